"""On a GPU: every method's step can really be captured as a CUDA graph, and replaying it is training."""

from __future__ import annotations

import pytest
import torch

from isofed.config import settings
from isofed.engine.replica import Job, Replica
from isofed.engine.world import World
from isofed.methods import names
from isofed.models.dropout import uniform

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
STEPS, BATCH = 12, 16
METHODS = [
    *(name for name in names() if name != "gradaug"),  # whose widths change from step to step: a graph for each piece
    *("scaffold:option=1", "fedprox+scaffold", "fednova+fedbn", "moon+feddecorr", "mixup+spherefed+fedsam"),
    *("feduv:detach=true", "stochdepth+fedalign"),
]


def replica(method: str, augment: str = "none", model: str = "cnn") -> Replica:
    chosen = settings(
        {
            "data": f"synthetic:samples=640,test=64,size={32 if model == 'pfl-cnn' else 16},channels=3",
            "method": method,
            "model": "resnet20" if "stochdepth" in method else model,
            "clients": 2,
            "partition": "iid",
            "batch_size": BATCH,
            "local_steps": STEPS,
            "augment": augment,
            "weight_decay": 1e-4,
            "clip": 5.0,
            "device": "cuda",
        }
    )
    return Replica(World.create(chosen), torch.device("cuda"))


def arrive(made: Replica) -> None:
    server = made.local.method.server_state(made.run)
    visit = made._arrive(Job(1, 0, 0.05, 0.5), made.initial, made.local.method.send(server), None)
    made.local.method.begin(visit)
    made.local.network.train()


@pytest.fixture(autouse=True)
def exact() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


@pytest.mark.parametrize("augment", ["none", "crop:2+flip"])
@pytest.mark.parametrize("method", METHODS)
def test_a_replayed_step_trains_as_the_eager_one_does(method: str, augment: str) -> None:
    replays(method, augment, "cnn")


def replays(method: str, augment: str, model: str) -> None:
    """Check that a captured step, replayed, trains as the eager one does."""
    eager = replica(method, augment, model)
    arrive(eager)
    for _ in range(STEPS):
        eager.local.take(BATCH)

    captured = replica(method, augment, model)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # what was made on the usual stream must be there before another one reads it
    with torch.cuda.stream(stream):  # warm up where the capture will look for its workspaces
        arrive(captured)
        for _ in range(3):
            captured.local.take(BATCH)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured.local.take(BATCH)
    arrive(captured)  # capturing runs nothing; the visit starts over at the same addresses
    for _ in range(STEPS):
        graph.replay()
    torch.cuda.synchronize()

    moved = (eager.flat - eager.initial).norm()
    assert moved > 0.01
    assert int(captured.local.step.counter) == STEPS
    # The same kernels in the same order: float32 rounding can only come from a different choice of algorithm.
    assert (captured.flat - eager.flat).norm() < 1e-4 * moved


@pytest.mark.parametrize("model", ["pfl-cnn", "mobilenetv2", "senet18", "feduv-resnet18"])
def test_networks_are_captured_too(model: str) -> None:
    replays("fedavg", "crop:2+flip", model)


def test_a_gpu_drops_the_same_entries() -> None:
    for key in (3, -(2**60)):
        here = uniform(torch.tensor(key), torch.Size((50, 300)))
        assert torch.equal(uniform(torch.tensor(key, device="cuda"), torch.Size((50, 300))).cpu(), here)
