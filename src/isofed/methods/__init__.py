"""The methods and how they compose."""

from isofed.methods.base import Method, Round, Run, Step, Visit
from isofed.methods.compose import Composition, parse
from isofed.methods.registry import find, names

__all__ = ["Composition", "Method", "Round", "Run", "Step", "Visit", "find", "names", "parse"]
