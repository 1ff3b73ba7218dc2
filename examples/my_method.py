"""A method of one's own, complete: isofed compare fedavg examples/my_method.py:KeepRows"""

from dataclasses import dataclass

from isofed import Method
from isofed.methods import Step
from isofed.spec import number


@dataclass(frozen=True)
class KeepRows(Method):
    """The head's rows of classes that a client does not have stay as they were received.

    Without this, cross-entropy at a client that never sees class c only ever pushes c's row down.
    """

    amount: float = number(1.0, at_least=0, at_most=1)  # 1 keeps these rows, 0 trains them like the others

    def gradient(self, step: Step) -> None:
        factor = 1 - self.amount * (step.label_counts == 0)  # one number a class
        for name, gradient in step.named(step.grad).items():
            if name.startswith("head."):  # head.weight [classes, width] and head.bias [classes]
                gradient.mul_(factor.view(-1, *[1] * (gradient.dim() - 1)))
