"""Diagnostics after a run, on the models that it kept: ``isofed diagnose``."""

from isofed.diagnose.command import NOT_FINITE, diagnose, diagnosed, missing
from isofed.diagnose.options import SECTIONS, Options
from isofed.diagnose.sections import Diagnosis

__all__ = ["NOT_FINITE", "SECTIONS", "Diagnosis", "Options", "diagnose", "diagnosed", "missing"]
