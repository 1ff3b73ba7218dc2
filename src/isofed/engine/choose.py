"""Which device and executor a run gets, and the arithmetic it asks of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from isofed import extras, tracking
from isofed.config import Settings
from isofed.engine.plan import steps_of
from isofed.engine.serial import Executor, Serial
from isofed.engine.slots import Slots
from isofed.engine.workers import Pool, Workers
from isofed.engine.world import World
from isofed.errors import UserError
from isofed.methods.compose import portable

if TYPE_CHECKING:
    from isofed.engine.ray_actors import Cluster

WORTH_WORKERS = 5000  # local steps from which on starting worker processes pays


@contextmanager
def executor_for(
    world: World, device: torch.device, shared: Pool | Cluster | None, note: Callable[[str], None] = lambda text: None
) -> Iterator[Executor]:
    """The executor that the settings ask for.

    ``shared`` are worker processes or actors that outlive the run; ``note`` hears what a person should know.
    """
    s, kind = world.settings, world.settings.executor
    if kind == "auto" and device.type == "cuda":
        kind = "slots"
    elif kind == "auto":
        worth = isinstance(shared, Pool) or worth_workers(s, steps_beside(world))
        kind = "workers" if worth and len(world.clients) > 1 and may_use_workers(s) else "serial"
    if device.type == "cpu" and s.precision == "bf16" and not native_bf16():
        note("this processor has no bfloat16 arithmetic of its own: precision=bf16 may be slower than fp32 here")
    if kind == "serial":
        yield Serial(world, device)
        return
    if kind == "slots":
        with closing(Slots(world, device, note)) as slots:
            yield slots
        return
    if not portable(s.method):
        raise UserError(
            f"the method '{s.method}' is a class of this session, which a worker process cannot import; "
            "put it into a file and name it as file.py:Class, or use executor=serial"
        )
    if kind == "ray":
        from isofed.engine.ray_actors import Cluster, RayActors

        cluster = shared if isinstance(shared, Cluster) else None
        with closing(RayActors(world, device, s.actors, cluster, note)) as actors:
            yield actors
        return
    pool = shared if isinstance(shared, Pool) else Pool(min(s.workers or available_cores(), len(world.clients)))
    try:
        yield Workers(world, pool)
    except KeyboardInterrupt:
        pool.kill()  # nobody waits for the visits that are under way
        raise
    finally:
        if pool is not shared:
            pool.close()


def may_use_workers(s: Settings) -> bool:
    """Whether clients of such a run could train in several processes of this machine."""
    if s.executor != "auto":
        return s.executor == "workers"
    return s.device == "cpu" and (s.workers or available_cores()) > 1 and portable(s.method)


def steps_beside(world: World) -> float:
    """About how many local steps of a run could be taken side by side with others: those of a single client cannot."""
    s = world.settings
    return s.rounds * sum(steps_of(len(c), s) for c in world.clients) * s.participation * (len(world.clients) > 1)


def worth_workers(s: Settings, steps: float) -> bool:
    """Whether so many steps are worth worker processes, which take seconds to start, or these are asked for."""
    return s.executor == "workers" or s.workers is not None or steps > WORTH_WORKERS


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def native_bf16() -> bool:
    """Whether this processor multiplies bfloat16 numbers; where one cannot know, it is not doubted."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return True
    return not words.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def device_of(text: str) -> torch.device:
    """The device by its name, if it is there."""
    try:
        device = torch.device(text)
    except RuntimeError:
        raise UserError(f"there is no device '{text}'; use cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device={text} is not supported; use cpu or cuda")
    if device.type == "cuda":
        # As many queues to the GPU as there may be slots; read when the GPU is first used.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise UserError(f"device={text} needs a GPU that PyTorch can use, and there is none here; use device=cpu")
        if (device.index or 0) >= count:
            raise UserError(f"there is no {text}: this machine has {count}, counted from cuda:0")
    return device


def check_here(s: Settings) -> None:
    """Refuse a recorded run that this machine cannot make, before any data are read for it."""
    device_of(s.device)
    tracking.check(s.track, recorded=True)
    if s.executor == "ray":
        extras.check("executor=ray", "Ray", "ray", "ray")


@contextmanager
def exact_arithmetic(s: Settings) -> Iterator[None]:
    """Switch on what precision and determinism ask of the GPU's kernels, for the time of a run."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = s.precision != "fp32"
    # Trying algorithms out and keeping the fastest makes the choice, and with it the last bits, a matter of chance.
    cudnn.deterministic, cudnn.benchmark = s.deterministic, False
    try:
        with torch.cuda.device(s.device) if s.device.startswith("cuda") else nullcontext():
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before
