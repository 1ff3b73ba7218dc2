"""The methods and how they compose."""

from isofed.methods.base import Final, Method, Round, Run, Step, Visit
from isofed.methods.compose import Composition, parse
from isofed.methods.registry import find, names

__all__ = ["Composition", "Final", "Method", "Round", "Run", "Step", "Visit", "find", "names", "parse"]
