"""The one local step: take a batch, run the passes, correct, clip, update.

Everything a step touches keeps its address: weights, gradient, momentum, client state, plan, learning rate and step
counter are copied into at the start of a visit and never replaced. So the same step can be called, or captured once
and replayed: all work goes through ``LocalStep.do``, which either does it or replays it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor, nn

from isofed.data.augment import parse as parse_augment
from isofed.data.base import Dataset, Part
from isofed.engine.sgd import Piece, collect, pieces, update
from isofed.engine.state import ClientState
from isofed.engine.world import World
from isofed.errors import BadMethod
from isofed.functional.kernels import one
from isofed.functional.shorten import shorten
from isofed.functional.sums import add_sum
from isofed.layout import Entry, Layout, Places, Tensors
from isofed.methods import Step
from isofed.methods.given import no_pass
from isofed.models import Network
from isofed.models.dense import Dense, goes_along, multiplied
from isofed.models.dropout import dropouts
from isofed.models.fused import fuse
from isofed.models.parts import added
from isofed.models.quick import quicken
from isofed.models.residual import is_closed
from isofed.models.slim import Cut


class Pictures:
    """A part of a data set on the device, giving normalised batches in channels-last order."""

    def __init__(self, part: Part, dataset: Dataset, device: torch.device) -> None:
        self.images, self.labels = part.images.to(device), part.labels.to(device)
        unit = 255.0 if part.images.dtype == torch.uint8 else 1.0
        self.scale = torch.tensor([1 / (unit * s) for s in dataset.std], device=device)
        self.shift = torch.tensor([-m / s for m, s in zip(dataset.mean, dataset.std, strict=True)], device=device)

    @cached_property
    def labels_here(self) -> np.ndarray:
        """The labels on the host."""
        return np.asarray(self.labels.cpu().numpy())

    def normalised(self, images: Tensor) -> Tensor:
        """Network inputs from stored pictures, which stay as they are."""
        # A copy also of floating-point pictures: they may be the data set's own, or an array of the user's.
        return images.to(torch.float32, copy=True).mul_(self.scale).add_(self.shift).permute(0, 3, 1, 2)


Do = Callable[[Hashable, Callable[[], None]], None]  # does the work that a key stands for

_AHEAD = 16  # steps whose pictures are made ready together on a GPU,
_AHEAD_VALUES = 2**22  # unless that would be more numbers than these


def at_once(_: Hashable, work: Callable[[], None]) -> None:
    """Simply do the work."""
    work()


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
        self._quicken(network, device)
        self.run = world.context(layout, device)

        step = self.step = Step()
        step.run, step.network = self.run, network
        step.weights = self.flat[layout.trained]
        step.start, step.grad = torch.zeros_like(step.weights), torch.zeros_like(step.weights)
        self.momentum = torch.zeros_like(step.weights)
        step.lr = torch.zeros((), device=device)
        step.counter = torch.zeros(1, dtype=torch.int64, device=device)
        step.label_counts = torch.zeros(self.run.classes, dtype=torch.int64, device=device)
        step.state, step.sent, step.plan = ClientState(method.client_state(self.run), device), {}, {}
        self.copies = Places({name: self.flat.clone() for name in method.copies}, "frozen copy")
        step.copies = {name: self._frozen(world.network(), layout, flat) for name, flat in self.copies.items()}
        self.loss = torch.zeros((), device=device)  # summed over the samples of a visit
        # Made here and not while a step is captured, to which it would belong; and not for somebody's own losses, which
        # may change in place what they are given to go back with: for all steps to come.
        self._one = one(device) if method.ours else None
        named = dict(network.named_parameters())
        trained = [e for e in layout.entries if e.trained]
        self.parameters = [named[e.name] for e in trained]
        self.gradients = [e.view(step.grad) for e in trained]
        self._place = {id(p): place for p, place in zip(self.parameters, self.gradients, strict=True)}
        self._gaps = _gaps(trained, step.grad)
        # Whether nothing but passes and the update, which keeps zeros, writes into the gradient.
        self.leaves_gaps = device.type == "cpu" and settings.clip is None and method.leaves_gradient
        self._pieces = pieces(trained if self.leaves_gaps else [], step.weights, step.grad, self.momentum)
        # Momentum and decay want a gradient of their own; plain SGD alone can do with what it is a product of.
        plain = not settings.momentum and not settings.weight_decay
        self._factored = _factored(network, self.parameters, self._pieces) if plain else []
        lowered = settings.precision == "bf16" and device.type == "cuda"
        self._half = torch.empty_like(self.flat, dtype=torch.bfloat16) if lowered else None
        self._halves = [] if self._half is None else _in_half(network, trained, self._half)
        self._half_copies = {} if self._half is None else {k: torch.empty_like(self._half) for k in self.copies}
        for name, half in self._half_copies.items():  # which nothing but passes in half precision reads
            for parameter, _, place in _in_half(step.copies[name], layout.entries, half):
                parameter.data = place
        step.host, step.position = {}, 0
        step.add_gradient, step.autocast, step.piece = self.add_gradient, self.autocast, self._piece
        step.passes, step.wider = self.passes, None
        self.dropouts = dropouts(network)
        self.do: Do = at_once
        self.arrived: Callable[[], None] = lambda: None  # told when a visit's tensors are in their places
        self.ahead = steps_ahead(settings.batch_size, train.images)
        self._rows = torch.arange(self.ahead, device=device)
        self._ready: tuple[Tensor, Tensor]  # inputs and labels of the next steps
        self._counted = False  # whether this batch's loss is in the sum
        self._fresh = True  # whether what is in the gradient is of the last step

    def _quicken(self, network: Network, device: torch.device) -> None:
        """Let a network use what is quick on its device."""
        if device.type == "cuda":
            fuse(network, unseen=self.method.ours)
        else:
            quicken(network, unseen=self.method.ours)

    def _frozen(self, network: Network, layout: Layout, flat: Tensor) -> Network:
        """A network that reads its weights from ``flat`` and is never trained."""
        layout.bind(network.to(flat.device), flat)
        self._quicken(network, flat.device)
        return network.eval().requires_grad_(False)

    def take(self, size: int) -> None:
        """Train on the next batch of the plan, of ``size`` samples."""
        step = self.step
        if step.position % self.ahead == 0:
            width = size if self.ahead == 1 else self.settings.batch_size
            self.do(("prepare", width), partial(self._prepare, width))
        if step.host:  # parts of this step differ from the next one's: only what is alike can be replayed
            self.do(("load", size), partial(self._load, size))
            self._counted, self._fresh = False, self.method.passes_first  # also where that was replayed
            self._around()
            self.do(("update", size), self._update)
        else:
            self.do(("step", size), partial(self._whole, size))
        step.position += 1

    def _whole(self, size: int) -> None:
        self._load(size)
        self._around()
        self._update()

    def _around(self) -> None:
        """The passes with what methods do around them."""
        self.method.around(self.step, self.passes)
        if not self._counted:  # a replay repeats what was done, so this is asked where a step is done or captured
            raise no_pass(self.method.wrappers)

    def _prepare(self, width: int) -> None:
        """Make the pictures of the next steps ready, ``width`` in each.

        Several steps at once: an augmentation is many small operations, which take a GPU as long for one batch as for
        ten. A processor gains nothing by it, and does the one batch that comes next.
        """
        step, train = self.step, self.train
        rows = (step.counter + self._rows).clamp_(max=len(step.plan["order"]) - 1)  # past the end nobody will look
        index = step.plan["order"].index_select(0, rows)[:, :width].flatten()
        images = train.images.index_select(0, index)
        if self.augment.parts:
            drawn = {k: v for k, v in step.plan.items() if k.startswith("augment.")}
            drawn = {k: v.index_select(0, rows)[:, :width].flatten(0, 1) for k, v in drawn.items()}
            images = self.augment.apply(images, drawn)
        inputs = train.normalised(images).permute(0, 2, 3, 1).unflatten(0, (self.ahead, width))
        self._ready = inputs, train.labels.index_select(0, index).view(self.ahead, width)

    def _fetch(self, size: int) -> None:
        """Put the next batch where the passes look for it."""
        row = self.step.counter % self.ahead
        inputs, labels = (ready.index_select(0, row)[0] if self.ahead > 1 else ready[0] for ready in self._ready)
        self.set_batch(inputs[:size].permute(0, 3, 1, 2), labels[:size])

    def _load(self, size: int) -> None:
        """Fetch the next batch, and let the methods change it."""
        step = self.step
        self._fetch(size)
        for n, layer in enumerate(self.dropouts):
            layer.key = step.draw("isofed.dropout")[n]
        self.method.batch(step)
        if not self.method.passes_first:  # who wraps the passes may put a gradient there before the first one
            step.grad.zero_()
            self._fresh = False
        elif self._gaps and self.method.corrects and not self.method.ours:  # whatever was put there in the last step
            torch._foreach_zero_(self._gaps)

    def set_batch(self, inputs: Tensor, labels: Tensor) -> None:
        """Put a batch where the passes and the methods look for it."""
        step = self.step
        step.inputs, step.labels, step.soft, step.size = inputs, labels, None, len(labels)
        self._counted, self._fresh = False, True

    def passes(self) -> None:
        """Forward and backward; the gradient is added to ``step.grad``."""
        first, self._counted = not self._counted, True  # a method may come back for a second pass, elsewhere
        work = partial(self.pass_over, count_loss=first, apart=True)
        self.do(("passes", self.step.size, first, self._fresh), work)
        self._fresh = False  # also where that was replayed

    def pass_over(self, count_loss: bool = False, apart: bool = False) -> None:
        """One forward and backward pass over the batch that is set.

        With ``apart``, a large gradient may stay where it was made if nobody but the update wants to see it.
        """
        step = self.step
        step.cuts = []
        for layer, _ in self._factored:
            layer.factors = [] if apart and self._fresh and not layer.weight._backward_hooks else None
        with self._lowered():
            with self.autocast():
                step.forward(step.inputs)
                losses = self.method.losses(step)
                more = [step.wider.loss(step)] if step.wider else []
            if count_loss:
                add_sum(self.loss, [loss.detach() for loss in losses], step.size)
            self._back([*losses, *more], step.cuts, whole=True, apart=apart)
        # Nothing may keep this pass's graph alive: it would hold memory, and tie a later capture to another stream.
        step.logits, step.stages, step.base_loss = step.logits.detach(), {}, step.base_loss.detach()
        step.cuts = []
        step.features = step.features if step.features is None else step.features.detach()

    def _piece(self, name: str, work: Callable[[], None]) -> None:
        def lowered() -> None:
            with self._lowered():
                work()

        self.do((name, self.step.size, self._fresh), lowered)
        self._fresh = False

    def add_gradient(self, loss: Tensor, cuts: Sequence[Cut] = (), whole: bool | None = None) -> None:
        """Backward: add a loss's gradient to ``step.grad``.

        With ``cuts``, the loss is a function of parts of the weights, and of the weights themselves only if it is said
        to be one of the ``whole``; otherwise the rest of the gradient stays as it is.
        """
        self._back([loss], cuts, not cuts if whole is None else whole)

    def _back(self, losses: Sequence[Tensor], cuts: Sequence[Cut], whole: bool, apart: bool = False) -> None:
        """The same for a sum of losses, which need not be added up for that."""
        first, self._fresh = self._fresh, False
        if first and not whole:
            self.step.grad.zero_()
        wanted = [*(self.parameters if whole else ()), *(cut.part for cut in cuts)]
        # Those that depend on nothing are left out, except where there is no other and PyTorch says so.
        losses = [loss for loss in losses if loss.requires_grad] or losses
        starts = [self._one if (loss.shape, loss.dtype) == ((), torch.float32) else None for loss in losses]
        for layer, _ in self._factored:
            if layer.factors:  # of a gradient that somebody has asked for on the way here
                layer.factors.clear()
        found: list[Tensor | None] = [*torch.autograd.grad(losses, wanted, starts, allow_unused=True)]
        self._take_factors(found, apart and first and not cuts)
        if all(gradient is None for gradient in found) and not any(piece.factors for piece in self._pieces):
            raise BadMethod(
                "a loss depends on no weight that is trained, so it trains nothing; that of a slimmed pass has to come "
                "with its cuts: step.add_gradient(loss, cuts)"
            )
        if whole:
            here = [self._pieces] if apart and first and not cuts else []
            collect(self.gradients, found[: len(self.gradients)], first, *here)
        if cuts:
            places = [self._place[id(cut.parameter)][cut.where] for cut in cuts]
            parts = [(p, g) for p, g in zip(places, found[-len(cuts) :], strict=True) if g is not None]
            for some in _apart([(p, g) for p, g in parts if not added(p, g)]):
                collect([p for p, _ in some], [g for _, g in some], first=False)

    def _take_factors(self, found: list[Tensor | None], keep: bool) -> None:
        """Leave gradients that came as factors to the update, or multiply them out if that cannot be."""
        for layer, piece in self._factored:
            factors, layer.factors, number = layer.factors, None, piece.number
            if factors and number is not None:
                others = found[number]  # of a loss that looks at the weight itself, say
                if keep and others is None:
                    piece.factors = factors
                else:
                    found[number] = multiplied(factors) if others is None else multiplied(factors) + others

    def lower_copies(self) -> None:
        """The frozen copies stay as they are from here to the end of the visit."""
        for name, half in self._half_copies.items():
            half.copy_(self.copies[name])

    @contextmanager
    def _lowered(self) -> Iterator[None]:
        """Passes in this block find the weights in half precision, and give gradients of that kind.

        Autocast would round them to the same numbers, one kernel for each weight and one for each gradient.
        """
        if self._half is not None:
            trained = self.run.layout.trained
            self._half[trained].copy_(self.flat[trained])
        for parameter, _, half in self._halves:
            parameter.data = half
        try:
            yield
        finally:
            for parameter, full, _ in self._halves:
                parameter.data = full

    def _update(self) -> None:
        """Correct and clip the gradient, and go along it."""
        s, step = self.settings, self.step
        self.method.gradient(step)
        if s.clip is not None:
            shorten(step.grad, s.clip)
        update(s, self._pieces, step.lr, step.counter)

    def autocast(self) -> AbstractContextManager[object]:
        """Half precision where it is asked for; master weights stay float32."""
        if self.settings.precision != "bf16":
            return nullcontext()
        # The cache of cast weights would hand a second pass the weights of the first.
        return torch.autocast(self.run.device.type, torch.bfloat16, cache_enabled=False)


def _apart(parts: Sequence[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    """Gradients with their places, in groups without a place that comes twice, which one kernel cannot add to.

    It does so if a pass goes through a slimmed layer more than once.
    """
    groups: list[dict[int, tuple[Tensor, Tensor]]] = []
    for place, gradient in parts:
        at = int(place.storage_offset())  # in the one vector that holds all of them
        group = next((group for group in groups if at not in group), None)
        if group is None:
            groups.append(group := {})
        group[at] = (place, gradient)
    return [[*group.values()] for group in groups]


def _factored(
    network: nn.Module, parameters: Sequence[nn.Parameter], pieces: Sequence[Piece]
) -> list[tuple[Dense, Piece]]:
    """Dense layers whose weight is a piece of its own, no other module's, and multiplied with as it is.

    Weight norm and pruning by hooks multiply with a tensor that they make of the parameter.
    """
    if not is_closed(network):  # somebody may ask for a gradient on its way, or change what it is made of
        return []
    owners: dict[int, list[nn.Module]] = {}
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    found = []
    for piece in pieces:
        if piece.number is None:
            continue
        parameter = parameters[piece.number]
        layer, *others = owners[id(parameter)]
        if others or not isinstance(layer, Dense):
            continue
        if layer._parameters.get("weight") is parameter and goes_along(piece.weights):
            found.append((layer, piece))
    return found


def _gaps(entries: Iterable[Entry], vector: Tensor) -> list[Tensor]:
    """The places of a vector over the trained weights that belong to no weight."""
    ends = [(e.offset, e.offset + e.size) for e in entries]
    starts = [start for start, _ in ends[1:]] + [len(vector)]
    return [vector[end:start] for (_, end), start in zip(ends, starts, strict=True) if start > end]


def _in_half(network: Network, entries: Iterable[Entry], half: Tensor) -> list[tuple[nn.Parameter, Tensor, Tensor]]:
    """The weights that half precision multiplies with: each as it is, and its place in a vector of that precision."""
    places = {e.name: e for e in entries}
    return [
        (parameter, parameter.data, places[f"{name}.{kind}"].view(half))
        for name, layer in network.named_modules()
        if isinstance(layer, (nn.Conv2d, nn.Linear))
        for kind, parameter in layer.named_parameters(recurse=False)
        if f"{name}.{kind}" in places
    ]


def steps_ahead(batch: int, images: Tensor) -> int:
    """Steps whose pictures are made ready together."""
    if images.device.type == "cpu":
        return 1
    return max(1, min(_AHEAD, _AHEAD_VALUES // (batch * images[0].numel())))


def refill(buffers: Tensors, values: Tensors) -> None:
    """Copy values into buffers that keep their addresses; a buffer of another shape is replaced."""
    for name, value in values.items():
        buffer = buffers.get(name)
        if buffer is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
            buffer.copy_(value)
        else:
            buffers[name] = value.clone()
