"""A method of one's own, complete: isofed compare fedavg examples/my_method.py:KeepRows"""

from dataclasses import dataclass

from isofed import Method, UserError
from isofed.methods import Step


@dataclass(frozen=True)
class KeepRows(Method):
    """The head's rows of classes that a client does not have stay as they were received.

    Without this, cross-entropy at a client that never sees class c only ever pushes c's row down.
    """

    amount: float = 1.0  # 1 keeps these rows, 0 trains them like the others

    def __post_init__(self) -> None:
        if not 0 <= self.amount <= 1:
            raise UserError(f"amount of KeepRows must be from 0 to 1, not {self.amount:g}")

    def gradient(self, step: Step) -> None:
        factor = 1 - self.amount * (step.label_counts == 0)  # one number a class
        for name, gradient in step.named(step.grad).items():
            if name.startswith("head."):  # head.weight [classes, width] and head.bias [classes]
                gradient.mul_(factor.view(-1, *[1] * (gradient.dim() - 1)))
