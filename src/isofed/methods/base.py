"""The places in a round where a method can act.

A method is a frozen dataclass: its fields are its hyper-parameters, its hooks are methods, and it holds no state.
What must be remembered is explicit, as named tensors: ``client_state`` stays with a client between its visits and
``server_state`` with the server, so a checkpoint, a network message and a resumed run all see the same thing.

Vectors. ``step.grad``, ``step.weights`` and ``step.start`` are flat vectors over everything the optimiser moves
(see :mod:`isofed.layout`); a correction of the whole gradient is one line. ``step.shared(v)`` is the part of such
a vector that travels, ``step.named(v)`` its tensors by name.

The rules of a step. ``batch``, ``base``, ``loss``, ``around`` and ``gradient`` may be captured in a CUDA graph:
shapes are fixed, nothing is read back to the host (no ``.item()``, no ``if tensor:``), and nothing is drawn at
random: every draw is made beforehand in ``plan`` and read with ``step.draw(name)``. A draw that decides a shape, such
as a width, is listed in ``host`` and read with ``step.known(name)``; what depends on it runs as a ``step.piece``.
``begin``, ``end``, ``upload``, ``receive``, ``aggregate`` and the exchange hooks run outside the graph and are
ordinary PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from isofed.errors import BadMethod
from isofed.layout import Layout, Policy, Tensors, copy_into
from isofed.models.base import Network, Output
from isofed.models.slim import Cut
from isofed.spec import check_ranges
from isofed.traces import place_here

if TYPE_CHECKING:
    from isofed.config import Settings

T = TypeVar("T")
Draws = dict[str, np.ndarray]
Normal = Callable[[str, bool], Tensor]  # see :func:`isofed.noise.normal_at`


class _InPlace:
    """An attribute that stays the same object, on which others rely: assigning a tensor to it copies the values.

    Reading it costs nothing more: without ``__get__``, Python looks into the object.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __set__(self, holder: Any, value: Any) -> None:
        own = vars(holder).setdefault(self._name, value)
        if own is value:
            return
        what = f"{type(holder).__name__.lower()}.{self._name}"
        if not isinstance(own, Tensor):
            raise BadMethod(f"{what} cannot be replaced, only what is in it can be changed{place_here()}")
        copy_into(own, value, what)


def _in_place(*names: str) -> Callable[[type[T]], type[T]]:
    """Let attributes of a class be changed in place alone, once they are there."""

    def decorated(cls: type[T]) -> type[T]:
        for name in names:
            setattr(cls, name, _InPlace(name))
        return cls

    return decorated


def _nothing_to_draw(purpose: str, system: bool) -> Tensor:
    raise RuntimeError(f"there is no generator for '{purpose}' here")


def _no_other() -> Tensor:
    raise RuntimeError("there is no network here whose weights could be drawn anew")


def _nothing_named(vector: Tensor) -> Tensors:
    raise RuntimeError("there is no network here whose tensors have names")


@dataclass(frozen=True)
class Run:
    """What is known about a run before it starts."""

    classes: int
    clients: int  # the whole population, not one round's
    samples: int  # of all clients together
    rounds: int
    momentum: float
    nesterov: bool
    layout: Layout
    device: torch.device
    shape: tuple[int, int, int] = (1, 1, 1)  # of a picture: channels, height, width
    batch_size: int = 1  # of a full batch
    ours: bool = False  # whether all parts of the method are of this package: nobody else looks into a pass

    @property
    def at_once(self) -> int:
        """Samples in a pass without gradients: what fits a processor's caches, or keeps a GPU busy.

        In larger passes on a CPU every layer fetches new memory from the system, which takes longer than its work.
        """
        pixels = 2**16 if self.device.type == "cpu" else 2**21
        return max(16, min(512, pixels // (self.shape[1] * self.shape[2])))

    def zeros(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """A vector with a place for each shared trained weight: the usual form of a method's state."""
        part = self.layout.shared_trained
        return torch.zeros(part.stop - part.start, dtype=dtype, device=self.device)


@_in_place("network", "label_counts", "model", "weights", "start", "state", "sent", "copies")
@dataclass
class Visit:
    """One client's stay in a round. After training, ``update`` is what the client will send."""

    run: Run
    network: Network
    round: int  # counted from 1
    client: int
    samples: int
    fraction: float  # this client's share in the whole population, by the run's weighting; sums to 1 over clients
    lr: float  # may be changed before the first step
    sizes: tuple[int, ...]  # the batch size of each step to come
    label_counts: Tensor  # int64 [classes], the client's training labels
    model: Tensor  # the whole model as it is now, statistics and fixed tensors included
    initial: Tensor  # the whole model as it was before round 1
    weights: Tensor  # trained weights as they are now
    start: Tensor  # trained weights as received
    state: Tensors  # the client's own, kept until its next visit; assigning to a name copies into its tensor
    sent: Tensors  # what the server sent besides the weights
    copies: Tensors  # the frozen copies a method asked for, each laid out like ``model``
    batches: Callable[[int], Iterator[tuple[Tensor, Tensor]]]  # inputs and labels without augmentation
    tests: Callable[[int], Iterator[tuple[Tensor, Tensor]]]  # of the test part, its domain's if it has one
    normal: Normal = _nothing_to_draw  # standard normal numbers for what leaves, one for each shared trained weight
    another: Callable[[], Tensor] = _no_other  # a whole model like ``initial``, of weights drawn for this client alone
    first: bool = False  # whether the client remembers nothing, not even that it was here
    bound: float | None = None  # the longest that an update may be, where a method says so
    skipped: int = 0  # batches of a single sample, left out for batch norm's sake
    full_gradient: Tensor | None = None  # of the local objective at the received weights, where a method asks for it
    pull: float = 0.0  # sum of the proximal strengths in the composition
    update: Tensor = field(default_factory=lambda: torch.empty(0))  # shared trained weights: now minus received
    mean: Tensors = field(default_factory=dict)  # sent back; the server sees the weighted mean over clients
    sum: Tensors = field(default_factory=dict)  # sent back; the server sees the sum over clients

    @property
    def steps(self) -> int:
        return len(self.sizes)

    def shared(self, vector: Tensor) -> Tensor:
        """The travelling part of a vector over the trained weights."""
        return vector[self.run.layout.shared_trained]

    def named(self, vector: Tensor) -> Tensors:
        """The tensors inside a vector, such as ``moved`` or a state made by ``run.zeros()``; views of it."""
        return self.run.layout.named(vector)

    @property
    def moved(self) -> Tensor:
        """How far training went, whatever methods have made of ``update`` since."""
        return self.shared(self.weights) - self.shared(self.start)


class Wider(Protocol):
    """A pass over more than the batch, and the loss of what is more; it goes back with the others, unrecorded."""

    def forward(self, inputs: Tensor) -> Output:
        """What the network gives for the batch."""

    def loss(self, step: Step) -> Tensor:
        """A term of the rest, asked for once after each ``forward``."""


@_in_place("weights", "start", "grad", "lr", "counter", "label_counts", "network", "state", "sent", "copies", "plan")
class Step:
    """One local step. The attributes up to ``plan`` keep their addresses for the life of a replica.

    So ``step.grad = step.grad + x`` copies into the vector that is there, and likewise for the other tensors.
    """

    run: Run
    network: Network
    weights: Tensor
    start: Tensor
    grad: Tensor
    lr: Tensor
    counter: Tensor
    label_counts: Tensor
    state: Tensors
    sent: Tensors
    copies: dict[str, Network]  # the frozen copies a method asked for, in eval mode
    plan: Tensors
    add_gradient: Callable[..., None]  # of a loss, with respect to the trained weights or to cuts of them, to ``grad``
    autocast: Callable[[], AbstractContextManager[object]]  # the run's precision, for passes that a method makes itself
    passes: Callable[[], None]  # what the innermost ``around`` is given as ``inner``
    # A part of the step whose shapes depend on what is known: the same name stands for the same shapes.
    piece: Callable[[str, Callable[[], None]], None]
    wider: Wider | None  # set by the innermost ``around``, for passes that run the network on more than the batch
    # set for each visit and each batch
    host: Draws
    position: int  # the step counter, on the host
    size: int
    inputs: Tensor
    labels: Tensor
    soft: Tensor | None  # [size, classes] where a method mixes labels
    logits: Tensor
    features: Tensor
    stages: dict[str, Tensor]
    base_loss: Tensor  # for the terms that are added to it
    cuts: list[Cut]  # parts of weights that a term used in their stead: the gradient of a part is as small as the part

    def __getattr__(self, name: str) -> Any:
        if name in ("position", "host"):
            raise RuntimeError(
                "step.position and step.known change on the host, which a captured step does not see; "
                "use step.counter and step.draw, or list the draw in `host` and look at it in `around`"
            )
        raise AttributeError(f"a step has no '{name}'")

    @property
    def targets(self) -> Tensor:
        """Class indices, or class probabilities where a method has mixed labels; cross_entropy takes either."""
        return self.labels if self.soft is None else self.soft

    def draw(self, name: str) -> Tensor:
        """This step's row of a planned draw."""
        if name not in self.plan:
            raise BadMethod(f"step.draw('{name}') asks for something that was drawn by no `plan`")
        return self.plan[name].index_select(0, self.counter)[0]

    def known(self, name: str) -> np.ndarray:
        """This step's row of a planned draw that the host may look at."""
        if name not in self.host:
            why = "is planned, but not listed in `host`" if name in self.plan else "was drawn by no `plan`"
            raise BadMethod(f"step.known('{name}') asks for something that {why}")
        row: np.ndarray = self.host[name][self.position]
        return row

    def forward(self, inputs: Tensor) -> Output:
        """Run the network and put what it gives where the losses look for it."""
        output: Output = (self.wider.forward if self.wider else self.network)(inputs)
        self.logits, self.stages = output.logits.float(), output.stages
        self.features = output.features.float() if isinstance(output.features, Tensor) else output.features
        return output

    def shared(self, vector: Tensor) -> Tensor:
        """The travelling part of a vector over the trained weights."""
        return vector[self.run.layout.shared_trained]

    def named(self, vector: Tensor) -> Tensors:
        """The tensors inside a vector, such as ``grad`` or a state made by ``run.zeros()``; views of it."""
        return self.run.layout.named(vector)


@dataclass
class Round:
    """What the server has in hand when all clients of a round have answered. Vectors are float64."""

    number: int  # counted from 1
    update: Tensor  # of the shared trained weights; the server will add it to them
    weights: Tensor  # shared trained weights that the clients received
    mean: Tensors
    sum: Tensors
    server: Tensors  # server_state, to be changed in place or by key
    clients: int  # that answered
    population: int
    fraction: float  # share of the clients that answered in the whole population, by the run's weighting
    asked: int = 0  # clients drawn for the round, whether or not they had data or answered
    normal: Normal = _nothing_to_draw  # standard normal numbers, one for each shared trained weight
    bound: float | None = None  # the longest that an update may be, where a method says so
    named: Callable[[Tensor], Tensors] = _nothing_named  # the tensors inside such a vector by name; views of it


@_in_place("weights", "network")
@dataclass
class Final:
    """What the server has in hand after the last round, while the clients' answers become the final model."""

    weights: Tensors  # the global model's, by name, to be changed in place or by key
    network: Network  # with these weights, in eval mode
    classes: int
    rng: np.random.Generator
    report: dict[str, float] = field(default_factory=dict)  # figures to be recorded


@dataclass(frozen=True)
class Method:
    """Base of all methods: every hook here does nothing, so a method writes only what it changes."""

    needs: ClassVar[tuple[str, ...]] = ()  # of a network, see :mod:`isofed.methods.needs`
    leaves: ClassVar[dict[str, str]] = {}  # options with which it does not own what it owns by default
    copies: ClassVar[tuple[str, ...]] = ()  # frozen copies of the network that a step reads
    host: ClassVar[tuple[str, ...]] = ()  # draws that decide shapes, read with ``step.known``, where it makes them
    _passes_first: ClassVar[bool] = False  # of ours alone: ``around`` begins with ``inner``, before it sees a gradient
    pooled: ClassVar[bool] = False  # all data at one client: not federated at all
    raw_answers: ClassVar[bool] = False  # answers are joined, not summed, and tell of single samples: only simulated
    uniform: ClassVar[bool] = False  # every client counts the same, whatever the run's weighting
    extras: ClassVar[tuple[str, ...]] = ()  # names of what clients send in ``mean`` and ``sum``
    guards: ClassVar[frozenset[str]] = frozenset()  # what must not go around it, see :mod:`isofed.methods.guard`
    paper: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def owns(self) -> frozenset[str]:
        """What this method alone decides, of "head", "base", "noise", "combine", "server" and "final"."""
        return frozenset()

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Questions to all clients after the last round."""
        return ()

    @property
    def pull(self) -> float:
        """Strength of a proximal pull towards the received weights, where there is one."""
        return 0.0

    @property
    def bound(self) -> float | None:
        """The norm beyond which no client's update goes, where this method sees to that."""
        return None

    @property
    def full_gradient(self) -> bool:
        """Whether ``visit.full_gradient`` is wanted: one more pass over the client's data, after every ``begin``."""
        return False

    def check(self, settings: Settings) -> None:
        """Refuse settings that make no sense with this method, by raising ``UserError``."""

    def build(self, network: Network, classes: int, rng: np.random.Generator) -> None:
        """Change the network, once, before round 1."""

    def share(self, network: Network) -> dict[str, Policy]:
        """Policies of the tensors that are not simply shared."""
        return {}

    def client_state(self, run: Run) -> Tensors:
        """What a client remembers between visits, as it is at the first one."""
        return {}

    def server_state(self, run: Run) -> Tensors:
        """What the server remembers between rounds, as it is before round 1."""
        return {}

    def send(self, server: Tensors) -> Tensors:
        """What the server sends to the clients besides the weights."""
        return {}

    def plan(self, visit: Visit, rng: np.random.Generator) -> Draws:
        """Every random draw of a visit, the first axis being the step."""
        return {}

    def begin(self, visit: Visit) -> None:
        """Before a client's first step."""

    def end(self, visit: Visit) -> None:
        """After a client's last step: may change the visit's ``state``, ``update``, ``mean`` and ``sum``."""

    def upload(self, visit: Visit) -> None:
        """After every ``end``: change the finished ``visit.update`` before it leaves the client."""

    def batch(self, step: Step) -> None:
        """Change ``step.inputs`` and ``step.soft``."""

    def base(self, step: Step) -> Tensor:
        """The base loss; only called for its owner, cross-entropy being used where there is none."""
        return torch.nn.functional.cross_entropy(step.logits, step.targets)

    def loss(self, step: Step) -> Tensor | None:
        """A term to add to the base loss: one number with a gradient, so a function of what the network gave."""
        return None

    def around(self, step: Step, inner: Callable[[], None]) -> None:
        """Wrap the forward and backward passes: call ``inner`` once or more, each adds a gradient to ``step.grad``."""
        inner()

    def gradient(self, step: Step) -> None:
        """Correct ``step.grad`` after the passes, before clipping and the optimiser."""

    def receive(self, update: Tensor, bound: float | None) -> Tensor:
        """What the server makes of one client's update before it is combined with the others'."""
        return update

    def combine(self, updates: Tensor, weights: Tensor) -> Tensor:
        """One update [n] from those of the clients [clients, n]; only called for its owner.

        The last columns are the changes of shared running statistics, where the network has such.
        """
        return (weights.double() @ updates.double()) / weights.double().sum()

    def aggregate(self, round: Round) -> None:
        """What the server makes of the combined update: change ``round.update`` and ``round.server``."""

    def evaluated(self, server: Tensors) -> Tensor | None:
        """The shared trained weights to be judged and kept as the final model, if not those that are sent."""
        return None

    def answer(self, exchange: str, visit: Visit) -> Tensors:
        """A client's answer to a question after the last round; answers are summed over clients."""
        return {}

    def finish(self, exchange: str, total: Tensors, final: Final) -> None:
        """What the server makes of the summed answers: change ``final.weights``, fill ``final.report``."""
