"""A method of one's own: label smoothing that leans towards the classes a client has few of.

isofed compare fedavg examples/my_method.py:RareSmoothing fedprox+examples/my_method.py:RareSmoothing
"""

from dataclasses import dataclass

import torch

from isofed import Method, UserError


@dataclass(frozen=True)
class RareSmoothing(Method):
    """Label smoothing towards the classes a client has few of.

    A share ``amount`` of each target goes to all classes, in proportion to 1 / (1 + the client's count of the class):
    local training then does not push down the classes that the client knows little about.
    """

    amount: float = 0.1

    def check(self, settings):
        if not 0 <= self.amount < 1:
            raise UserError(f"amount of RareSmoothing must be at least 0 and below 1, not {self.amount:g}")

    def batch(self, step):
        rare = 1 / (1 + step.label_counts.float())
        hard = torch.eye(step.run.classes, device=rare.device)[step.labels] if step.soft is None else step.soft
        step.soft = (1 - self.amount) * hard + self.amount * rare / rare.sum()
