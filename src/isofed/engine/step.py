"""The one local step: take a batch, run the passes, correct, clip, update.

Everything a step touches keeps its address: weights, gradient, momentum, client state, plan, learning rate and step
counter are copied into at the start of a visit and never replaced. So the same step can be called, or captured once
and replayed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from isofed.data.augment import parse as parse_augment
from isofed.data.base import Dataset, Part
from isofed.engine.world import World
from isofed.layout import Layout, Tensors
from isofed.methods import Step
from isofed.models import Network
from isofed.models.dropout import dropouts


class Pictures:
    """A part of a data set on the device, giving normalised batches in channels-last order."""

    def __init__(self, part: Part, dataset: Dataset, device: torch.device) -> None:
        self.images, self.labels = part.images.to(device), part.labels.to(device)
        unit = 255.0 if part.images.dtype == torch.uint8 else 1.0
        self.scale = torch.tensor([1 / (unit * s) for s in dataset.std], device=device)
        self.shift = torch.tensor([-m / s for m, s in zip(dataset.mean, dataset.std, strict=True)], device=device)

    def normalised(self, images: Tensor) -> Tensor:
        """Network inputs from stored pictures."""
        return images.float().mul_(self.scale).add_(self.shift).permute(0, 3, 1, 2)


class LocalStep:
    """A network with its optimiser and buffers, and the step that trains it."""

    def __init__(self, network: Network, train: Pictures, world: World) -> None:
        device, settings, method = train.images.device, world.settings, world.settings.method
        layout = Layout.of(network, method.share(network))
        self.network, self.method, self.settings, self.train = network, method, settings, train
        self.augment = parse_augment(settings.augment)
        self.flat = layout.pack(network, device)
        network.to(device)
        layout.bind(network, self.flat)
        self.run = world.context(layout, device)

        step = self.step = Step()
        step.run, step.network = self.run, network
        step.weights = self.flat[layout.trained]
        step.start, step.grad = torch.zeros_like(step.weights), torch.zeros_like(step.weights)
        self.momentum = torch.zeros_like(step.weights)
        step.lr = torch.zeros((), device=device)
        step.counter = torch.zeros(1, dtype=torch.int64, device=device)
        step.label_counts = torch.zeros(self.run.classes, dtype=torch.int64, device=device)
        step.state, step.sent, step.plan = method.client_state(self.run), {}, {}
        self.copies = {name: self.flat.clone() for name in method.copies}
        step.copies = {name: _frozen(world.network(), layout, flat) for name, flat in self.copies.items()}
        self.loss = torch.zeros((), device=device)  # summed over the samples of a visit
        named = dict(network.named_parameters())
        trained = [e for e in layout.entries if e.trained]
        self.parameters = [named[e.name] for e in trained]
        self.gradients = [e.view(step.grad) for e in trained]
        step.host, step.position = {}, 0
        step.add_gradient, step.autocast = self.add_gradient, self.autocast
        self.dropouts = dropouts(network)
        self._counted = False  # whether this batch's loss is in the sum

    def take(self, size: int) -> None:
        """Train on the next batch of the plan, of ``size`` samples."""
        step, method = self.step, self.method
        self._load(size)
        for n, layer in enumerate(self.dropouts):
            layer.key = step.draw("isofed.dropout")[n]
        method.batch(step)
        step.grad.zero_()
        method.around(step, self.passes)
        method.gradient(step)
        self._update()
        step.counter.add_(1)
        step.position += 1

    def _load(self, size: int) -> None:
        step, train = self.step, self.train
        index = step.draw("order")[:size]
        images = train.images.index_select(0, index)
        if self.augment.parts:
            drawn = {k: step.draw(k)[:size] for k in step.plan if k.startswith("augment.")}
            images = self.augment.apply(images, drawn)
        self.set_batch(train.normalised(images), train.labels.index_select(0, index))

    def set_batch(self, inputs: Tensor, labels: Tensor) -> None:
        """Put a batch where the passes and the methods look for it."""
        step = self.step
        step.inputs, step.labels, step.soft, step.size = inputs, labels, None, len(labels)
        self._counted = False

    def passes(self) -> None:
        """Forward and backward; the gradient is added to ``step.grad``."""
        step = self.step
        with self.autocast():
            step.forward(step.inputs)
            loss = self.method.objective(step)
        if not self._counted:  # a method may come back for a second pass, elsewhere
            self.loss.add_(loss.detach(), alpha=step.size)
            self._counted = True
        self.add_gradient(loss)
        # Nothing may keep this pass's graph alive: it would hold memory, and tie a later capture to another stream.
        step.logits, step.stages, step.base_loss = step.logits.detach(), {}, step.base_loss.detach()
        step.features = step.features if step.features is None else step.features.detach()

    def add_gradient(self, loss: Tensor) -> None:
        """Backward: add a loss's gradient to ``step.grad``."""
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        if any(f is None for f in found):  # a tensor that this loss does not depend on
            pairs = [(g, f) for g, f in zip(self.gradients, found, strict=True) if f is not None]
            torch._foreach_add_([g for g, _ in pairs], [f for _, f in pairs])
        else:
            torch._foreach_add_(self.gradients, list(found))

    def _update(self) -> None:
        """SGD as ``torch.optim.SGD`` defines it, on the whole vector at once."""
        s, step = self.settings, self.step
        direction = step.grad
        if s.clip is not None:
            direction.mul_((s.clip / (torch.linalg.vector_norm(direction) + 1e-6)).clamp_(max=1.0))
        if s.weight_decay:
            direction.add_(step.weights, alpha=s.weight_decay)
        if s.momentum:
            self.momentum.mul_(s.momentum).add_(direction)
            direction = direction.add_(self.momentum, alpha=s.momentum) if s.nesterov else self.momentum
        step.weights.addcmul_(direction, step.lr, value=-1)

    def autocast(self) -> AbstractContextManager[object]:
        """Half precision where it is asked for; master weights stay float32."""
        if self.settings.precision != "bf16":
            return nullcontext()
        # The cache of cast weights would hand a second pass the weights of the first.
        return torch.autocast(self.run.device.type, torch.bfloat16, cache_enabled=False)


def _frozen(network: Network, layout: Layout, flat: Tensor) -> Network:
    """A network that reads its weights from ``flat`` and is never trained."""
    layout.bind(network.to(flat.device), flat)
    return network.eval().requires_grad_(False)


def refill(buffers: Tensors, values: Tensors, grow: bool = False) -> None:
    """Copy values into buffers that keep their addresses.

    With ``grow`` the first axis may differ: a buffer moves only when it is too short, and rows past the end are stale.
    """
    for name, value in values.items():
        buffer = buffers.get(name)
        if buffer is not None and buffer.shape == value.shape:
            buffer.copy_(value)
        elif grow and buffer is not None and buffer.shape[1:] == value.shape[1:] and len(buffer) > len(value):
            buffer[: len(value)].copy_(value)
        else:
            buffers[name] = value.clone()
