"""What a round collects: the same in one place or in several, whoever was where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from isofed.collect import Collected, Partial
from isofed.engine.portable import arrays, tensors
from isofed.engine.replica import Job, Outcome
from isofed.federation import Federation
from tests.engine.own_methods import HERE
from tests.engine.plain import small


def outcomes(run: Federation, jobs: list[Job], rng: np.random.Generator) -> list[Outcome]:
    """Made-up answers with everything that an answer can have; some fail, and some take no step."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape).astype(np.float32))

    part, layout = run.layout.shared_trained, run.layout
    made = []
    for job in jobs:
        steps = int(rng.integers(0, 3))
        made.append(
            Outcome(
                job.client,
                drawn(part.stop - part.start),
                drawn(layout.shared.stop - part.stop),
                {"a": drawn(5), **({"rare": drawn(2)} if job.client % 3 == 0 else {})},
                {"b": drawn(3)},
                {"state": drawn(4)},
                drawn(layout.total) if job.client % 2 else None,
                loss=float(rng.normal()) if steps else float("nan"),
                steps=steps,
                samples=16 * steps,
                skipped=int(rng.integers(0, 2)),
                problem="failed" if job.client % 5 == 4 else None,
            )
        )
    return made


def result(run: Federation, collected: Collected) -> dict[str, Any]:
    """Everything that the round reads."""
    sums = {k: v.sum() for k, v in collected.sums.items()} | {k: v.mean() for k, v in collected.means.items()}
    update, statistics = collected.combined(run.state.weights[run.layout.shared])
    found = {"update": update, "statistics": statistics} | sums
    found |= {f"state {c}": state["state"] for c, state in collected.states.items()}
    found |= {f"model {c}": model for c, model in collected.models.items()}
    events = sorted(collected.events, key=lambda e: e["client"])
    line = collected.line({"sent": torch.ones(3)}, {1, 2})
    return {k: v.numpy().tobytes() for k, v in found.items()} | line | {"events": events, "done": collected.answered}


@pytest.mark.parametrize("method", ["fedavg", f"{HERE}:Median"], ids=["mean", "median"])
def test_clients_may_be_collected_anywhere(method: str) -> None:
    run = small(method=method, model="cnn", clients=12, data="synthetic:samples=200,test=20,classes=4")
    jobs, _ = run._sample(1)
    answers = outcomes(run, jobs, np.random.default_rng(0))
    whole = Collected(run.world, run.layout, jobs)
    for answer in answers:
        whole.add(answer)
    wanted = result(run, whole)
    assert wanted["clients"] == 10 and {e["event"] for e in wanted["events"]} == {
        "failed",
        "took no step: it has a single sample",
    }
    rng = np.random.default_rng(1)
    for places in (1, 2, 3, 12):
        far = [Collected(run.world, run.layout, jobs) for _ in range(places)]
        for i in rng.permutation(len(answers)):
            far[rng.integers(places)].add(answers[i])
        here = Collected(run.world, run.layout, jobs)
        for some in far:
            journey = tensors(arrays(some.content()), torch.device("cpu"))
            here.add(Partial(some.answered, journey))
        assert result(run, here) == wanted


def test_news_without_content_only_moves_the_count() -> None:
    run = small()
    jobs, _ = run._sample(1)
    collected = Collected(run.world, run.layout, jobs)
    for answered, done in ((3, 3), (-2, 1), (3, 4)):
        collected.add(Partial(answered))
        assert collected.answered == done
    assert collected.clients == 0 and not collected.events
