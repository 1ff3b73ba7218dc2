"""The formulas of the methods as pure functions, usable in anyone's training loop."""

from isofed.functional.steps import normalising_steps

__all__ = ["normalising_steps"]
