"""What a method costs a client and the network between, found out by running it.

A client visits twice, so that what is remembered from a first visit counts too, and takes one step each time. Layers
report the multiplications they really do, slimmed or not; the step reports which vectors it really reads; what is sent
is counted by the code that counts it in every run. Nothing about a method is written down here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isofed.config import settings as make_settings
from isofed.data import Dataset, load
from isofed.engine.replica import Job, Replica, one_thread
from isofed.engine.world import World
from isofed.layout import Policy, Tensors
from isofed.methods import Step
from isofed.models import create, has_batch_norm
from isofed.models.base import Network
from isofed.models.winograd import Convolution, Cut

PICTURES = "synthetic:samples=10,test=10,classes=10,channels=3,size={size}"
SIZE, USUAL = 16, 32  # pixels: enough to compare methods on resnet8; those that a network which is named is made for
BATCH = 8


@dataclass(frozen=True)
class Cost:
    """Of one client; counts of numbers (floats) and of multiply-accumulates, not bytes."""

    parameters: int  # weights of the network, trained or not
    trained: int  # of these, what the optimiser moves
    network_macs: int  # multiply-accumulates of one plain pass of one sample
    macs: float  # of all that a step forwards, per sample
    flops: float | None  # of a step, forward and backward, per sample: two for each multiply-accumulate
    passes: float  # through the network, or a slimmed form of it or a frozen copy, in a step
    passes_per_round: float  # over all the client's data, besides the steps
    held: int  # numbers that a step reads: the network, copies of it, vectors of its size
    down: int  # received in a round
    up: int  # sent in a round
    down_once: int  # received at the first visit only
    up_finally: int  # sent after the last round
    down_finally: int  # received for that
    flops_finally: float | None  # of the answer to that, per sample, besides a pass through the network
    client_state: int  # kept between visits
    server_state: int  # kept by the server

    @property
    def models(self) -> float:
        """What is held during a step, in models."""
        return self.held / self.parameters


def pictures(named: bool) -> str:
    """The data that costs are found on: of a network that was named, or of the usual one."""
    return PICTURES.format(size=USUAL if named else SIZE)


@one_thread(torch.device("cpu"))  # small layers, which several threads would only wait for one another with
def cost(method: Any, *, dataset: Dataset | None = None, operations: bool = False, **settings: Any) -> Cost:
    """Run a method for two visits of one step, and count.

    Args:
        method: as in a run, ``"fedavg+feduv"``.
        dataset: pictures of your own; only their shape and classes matter here.
        operations: count the operations of a step's backward pass and of the last answer as well, which takes longer.
        settings: of a run, such as ``model="resnet56"`` and ``data=``; by default resnet8 on tiny pictures, and another
            model on pictures of 32x32.
    """
    usual = {"model": "resnet8", "batch_size": BATCH, "data": pictures("model" in settings)}
    fixed = {"partition": "iid", "local_steps": 1, "local_epochs": None, "device": "cpu"}
    chosen = make_settings(usual | settings | fixed | {"method": method})
    chosen = chosen.model_copy(update={"clients": 2})  # whether a method wants more is a matter of its runs
    dataset = dataset or load(chosen.data, chosen.root)
    if chosen.norm == "own" and "statistics" in chosen.method.guards:
        plain_network = create(chosen.model, classes=len(dataset.classes), shape=dataset.shape)
        if has_batch_norm(plain_network):  # whose statistics the method refuses; group norm costs the same
            chosen = chosen.model_copy(update={"norm": "group:2"})
    # A batch for each client is enough: the same samples again, if there are fewer.
    few = dataset.train.subset(np.arange(2 * chosen.batch_size) % len(dataset.train))
    world = World.create(chosen, dataclasses.replace(dataset, train=few))
    replica = Replica(world, torch.device("cpu"))
    network, layout, composition = replica.local.network, replica.run.layout, world.settings.method
    server = composition.server_state(replica.run)
    sent, job = composition.send(server), Job(1, 0, 1e-3, 0.5)
    meter, per_sample = _Meter(replica), world.settings.batch_size
    up_finally, flops_finally = 0, 0.0
    plain = int(pass_macs(network))
    with meter.watching():
        first = replica.visit(job, replica.initial, sent, None)
        meter.reset()
        meter.operations = operations
        again = replica.visit(Job(2, 0, 1e-3, 0.5), replica.initial, sent, first.state)
        step_macs, step_flops, step_passes = meter.step_macs, meter.step_flops, meter.step_passes
        others, read = meter.passes - meter.step_passes, meter.read
        for name, _ in composition.exchanges:
            meter.reset()
            meter.operations = operations
            with meter.counter() as counter:
                answer = replica.answer(name, Job(3, 0, 1e-3, 0.5), replica.initial, sent, again.state)
            up_finally += sum(value.numel() for value in answer.values())
            flops_finally += counter.get_total_flops() - 2 * meter.macs if counter else 0
    shared, numbers = layout.count(Policy.SHARED), lambda some: sum(layout.numbers(v) for v in some.values())
    return Cost(
        parameters=sum(p.numel() for p in network.parameters()),
        trained=sum(e.size for e in layout.entries if e.trained),
        network_macs=plain,
        macs=step_macs / per_sample,
        flops=step_flops / per_sample if operations else None,
        passes=step_passes,
        passes_per_round=others * per_sample / len(world.clients[0]),
        held=_held(replica, read),
        down=0 if composition.pooled else shared + numbers(sent),
        up=0 if composition.pooled else shared + numbers(again.mean) + numbers(again.sum),
        down_once=0 if composition.pooled else layout.count(Policy.FIXED) + layout.count(Policy.RESET),
        up_finally=up_finally,
        down_finally=len(composition.exchanges) * layout.count(Policy.SHARED),
        flops_finally=flops_finally / len(world.clients[0]) if operations else None,
        client_state=numbers(again.state),
        server_state=numbers(server),
    )


def _held(replica: Replica, read: dict[str, int]) -> int:
    own = sum(p.numel() for p in replica.local.network.parameters())
    return own * (1 + len(replica.local.copies)) + sum(read.values())


class _Meter:
    """Counts what layers multiply and what a step reads."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.networks: list[Network] = [replica.local.network, *replica.local.step.copies.values()]
        self.reset()

    def reset(self) -> None:
        self.macs = self.step_macs = self.step_flops = 0.0
        self.passes = self.step_passes = 0.0
        self.read: dict[str, int] = {}
        self.stepping = self.operations = False

    def counter(self) -> AbstractContextManager[Any]:
        """Torch's counter of operations, if they are to be counted: it alone takes seconds to import."""
        if not self.operations:
            return nullcontext()
        from torch.utils.flop_counter import FlopCounterMode

        return FlopCounterMode(display=False)

    @contextmanager
    def watching(self) -> Iterator[None]:
        local, hooks = self.replica.local, []
        for network in self.networks:
            hooks.append(network.register_forward_hook(self._passed))
            layers = [m for m in network.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
            hooks += [layer.register_forward_hook(self._multiplied) for layer in layers]
        step, take = local.step, local.take
        step.__class__ = _watched(self._reads)
        own = {name: vars(step)[name] for name in ("state", "sent")}
        vars(step).update({name: _Read(of, self._reads, name) for name, of in own.items()})
        local.take = self._stepping(take)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            del local.take
            step.__class__ = Step
            vars(step).update(own)

    def _stepping(self, take: Callable[[int], None]) -> Callable[[int], None]:
        def watched(size: int) -> None:
            self.stepping = True
            with self.counter() as counter:
                take(size)
            self.stepping = False
            self.step_flops += counter.get_total_flops() if counter else 0

        return watched

    def _passed(self, network: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        self.passes += 1
        self.step_passes += self.stepping

    def _multiplied(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        macs = multiplications(layer, inputs[0], output)
        self.macs += macs
        self.step_macs += macs if self.stepping else 0.0

    def _reads(self, name: str, value: Tensor) -> None:
        if self.stepping and not name.startswith("sent/isofed."):
            self.read[name] = self.replica.run.layout.numbers(value)


def multiplications(layer: nn.Module, inputs: Tensor, output: Tensor) -> float:
    """Multiply-accumulates that a convolution or a linear layer has just done, from the shapes that it really saw."""
    arriving = inputs.shape[1] if isinstance(layer, nn.Conv2d) else inputs.shape[-1]
    if isinstance(layer, nn.Conv2d):
        # Groups of one channel in a slimmed layer as in a full one; otherwise there is one group, or as given.
        groups = arriving if layer.groups == layer.in_channels else layer.groups
        arriving = arriving // groups * layer.kernel_size[0] * layer.kernel_size[1]
        if isinstance(layer, Convolution):  # which may have given the largest of its numbers alone
            cut = Cut.of(layer, inputs)
            return float(len(output) * output.shape[1] * cut.height * cut.width * arriving)
    return float(output.numel() * arriving)


def pass_macs(network: Network) -> float:
    """Multiply-accumulates of one sample's pass through a network, in convolutions and linear layers."""
    assert network.shape is not None
    total, before, hooks = [0.0], network.training, []

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        total[0] += multiplications(layer, inputs[0], output)

    layers = [m for m in network.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    try:
        hooks = [layer.register_forward_hook(count) for layer in layers]
        with torch.no_grad():
            network.eval()(torch.zeros(1, *network.shape))
    finally:
        for hook in hooks:
            hook.remove()
        network.train(before)
    return total[0]


class _Read(dict[str, Tensor]):
    """Named tensors that tell when one is read."""

    def __init__(self, tensors: Tensors, tell: Callable[[str, Tensor], None], kind: str) -> None:
        super().__init__(tensors)
        self._tell, self._kind = tell, kind

    def __getitem__(self, name: str) -> Tensor:
        value = super().__getitem__(name)
        self._tell(f"{self._kind}/{name}", value)
        return value


def _watched(tell: Callable[[str, Tensor], None]) -> type[Step]:
    """A step that tells when a method looks at the weights as they were received."""

    class Watched(Step):
        @property
        def start(self) -> Tensor:  # type: ignore[override]
            value: Tensor = self.__dict__["start"]
            tell("start", value)
            return value

    return Watched
