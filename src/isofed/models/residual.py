"""Residual blocks, with a gate that stochastic depth can close."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from isofed.models.batch_norm import twin_of


class Residual(nn.Module):
    """A branch around which the input flows unchanged or through a shortcut: relu(shortcut(x) + branch(x)).

    ``before`` comes before the branch and the shortcut (of pre-activation blocks); ``relu=False`` leaves out the last
    step (of linear bottlenecks). With ``keep`` below 1 the branch is there only sometimes: in training it is multiplied
    by ``gate`` (0 or 1, set for each batch), otherwise by ``keep``. A branch that is shut leaves no trace in its batch
    norm's running statistics.
    """

    def __init__(
        self,
        branch: nn.Module,
        shortcut: nn.Module | None = None,
        before: nn.Module | None = None,
        relu: bool = True,
    ) -> None:
        super().__init__()
        self.before = before
        self.branch = branch
        self.shortcut = shortcut
        self.relu = relu
        self.joins = False  # whether the last layer of the branch may do the sum and the ReLU along with its own work
        self.twins = False  # whether nobody asks for a gradient between blocks, so that it may come back in two parts
        self.keep = 1.0
        self.gate: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.keep < 1.0 and self.training and self.gate is not None:
            kept = [(b, b.clone()) for b in self._statistics()]
            y, inside = self._inside(x)
            for now, old in kept:
                # Through .data: the backward pass of batch norm does not need these, but would mind their change.
                now.data.copy_(torch.where(self.gate > 0, now.data, old))
            inside = self.gate * inside
        elif self.joins and self.keep == 1.0 and not watched(self.branch, _last(self.branch)):
            return self._joined(x)
        else:
            y, inside = self._inside(x)
            inside = inside if self.keep == 1.0 else self.keep * inside
        return self._sum(self._aside(x, y, inside.shape[1]), inside)

    def _sum(self, aside: Tensor, inside: Tensor) -> Tensor:
        return (aside + inside).relu_() if self.relu else aside + inside

    def _joined(self, x: Tensor) -> Tensor:
        """The same, where the branch's last layer is a batch norm that adds and cuts off by itself."""
        y = inside = x if self.before is None else self.before(x)
        *layers, norm = cast(nn.Sequential, self.branch)
        for layer in layers:
            inside = layer(inside)
        aside = self._aside(x, y, inside.shape[1])
        if aside.shape != inside.shape or aside.dtype != inside.dtype:
            return self._sum(aside, norm(inside))
        joined: Tensor = norm(inside, aside, self.relu)
        return joined

    def _aside(self, x: Tensor, y: Tensor, channels: int) -> Tensor:
        """What flows around the branch, which gives so many channels and sees ``y``."""
        if isinstance(self.shortcut, PadShortcut):
            # As many channels as the branch has, also in a network that runs at less than its full width.
            return self.shortcut(self._twin(y), channels)
        return self._twin(x) if self.shortcut is None else self.shortcut(self._twin(y))

    def _twin(self, x: Tensor) -> Tensor:
        return twin_of(x) if self.twins else x

    def _inside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the branch sees, and what it makes of it."""
        y = x if self.before is None else self.before(x)
        return y, self.branch(y)

    def _statistics(self) -> list[Tensor]:
        """The running statistics that nothing but the branch uses: also those before it, where no shortcut does."""
        alone = [self.branch] if self.before is None or self.shortcut is not None else [self.before, self.branch]
        return [b for module in alone for b in module.buffers() if b.is_floating_point()]


def _last(branch: nn.Module) -> nn.Module | None:
    return next(reversed(branch._modules.values()), None)


def is_ours(layer: nn.Module) -> bool:
    """Whether a layer is one of PyTorch's or of this package, of which it is known what they look at."""
    return type(layer).__module__.startswith(("torch.nn.", "isofed."))


def watched(*layers: nn.Module | None) -> bool:
    """Whether somebody hooked into one of these layers, and expects to see what they take and give by themselves."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(layer, kind, None) for layer in layers for kind in kinds)


def is_closed(network: nn.Module) -> bool:
    """Whether nobody can look at what is between the layers of a network, or ask for a gradient there.

    All of its modules are known then, nobody has hooked into any of them, nor put something in the place of what it
    does: a hook of a module sees what the layers inside of it have made.
    """
    modules = [*network.modules()]
    known = all(is_ours(module) and "forward" not in vars(module) for module in modules)
    return known and not watched(*modules) and not _has_any_global_hook()


def residual_blocks(network: nn.Module) -> list[Residual]:
    """The blocks of a network in the order of the forward pass."""
    return [m for m in network.modules() if isinstance(m, Residual)]


class PadShortcut(nn.Module):
    """A shortcut without weights: every second pixel, and zeros for the channels that are new (ResNet's option A)."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor, channels: int) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        more = channels - x.shape[1]
        return nn.functional.pad(x, (0, 0, 0, 0, more // 2, more - more // 2))
