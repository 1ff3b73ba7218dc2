"""Tensors that stay at home, start afresh or are fixed: who has which, and what is sent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isofed.engine.workers import Pool
from isofed.federation import Federation
from isofed.layout import Policy
from tests.engine.own import BOTH, own
from tests.engine.plain import TOLERANCE, Named, Plain, distance, mean, vector

HEAD = ["head.weight", "head.bias"]


def by_hand(run: Federation, policy: str) -> tuple[Named, dict[int, Named]]:
    plain = Plain(run)
    initial = plain.start()
    server, own_head = dict(initial), dict[int, Named]()
    for parameter in plain.network.head.parameters():
        parameter.requires_grad_(policy != "fixed")
    for round in range(1, run.settings.rounds + 1):
        models = []
        for k in range(4):
            head = {n: initial[n] for n in HEAD}
            if policy == "home":
                head = own_head.get(k, head)
            model, _ = plain.local(server | head, round, k)
            own_head[k] = {n: model[n] for n in HEAD}
            models.append(model)
        averaged = mean(models, [float(n) for n in plain.sizes])
        server = averaged | {n: initial[n] for n in HEAD}
    return server, own_head


@BOTH
@pytest.mark.parametrize("policy", ["home", "reset", "fixed"])
def test_policies(policy: str, executor: str, two_workers: Pool) -> None:
    settings = {"weight_decay": 0.1, "momentum": 0.5, "rounds": 3}
    run = own(f"Place:policy={policy}", two_workers, executor, **settings)
    initial = {k: v.clone() for k, v in run.layout.views(run.state.weights).items()}
    result = run.fit()
    server, heads = by_hand(run, policy)
    found = run.layout.views(run.state.weights)
    assert distance(found, server) < TOLERANCE
    for name in HEAD:  # nobody sent it, so the server's is as it was
        assert torch.equal(found[name], initial[name])
    if policy == "home":
        for k, state in run.state.clients.items():
            head = run.layout.views(state["isofed.home"], run.layout.home_trained)
            assert distance(head, heads[k]) < TOLERANCE
    else:
        assert all(state == {} for state in run.state.clients.values())
    # Bytes: what is shared, every round; what is fixed or starts afresh, to each client once.
    numbers = sum(v.numel() for v in initial.values())
    head_numbers = 64 * 4 + 4
    shared = numbers - head_numbers
    assert [line["bytes_up"] for line in result.history] == [4 * shared * 4] * 3
    first = 4 * (shared if policy == "home" else numbers) * 4
    assert [line["bytes_down"] for line in result.history] == [first, 4 * shared * 4, 4 * shared * 4]


def test_a_new_client_gets_what_is_fixed_when_it_first_comes() -> None:
    run = own("Place:policy=fixed", rounds=6, participation=0.25)
    result = run.fit()
    known: set[int] = set()
    from tests.engine.plain import participants

    shared = run.layout.count(Policy.SHARED)
    for line in result.history:
        (client,) = participants(run, line["round"])
        assert line["bytes_down"] == 4 * (shared + (0 if client in known else 64 * 4 + 4))
        known.add(client)
    assert len(known) > 1


def test_a_fixed_tensor_keeps_its_bytes_at_every_client(tmp_path: Path) -> None:
    from isofed.files import load_tensors

    run = own("Place:policy=fixed", rounds=2, weight_decay=0.5, momentum=0.9, keep_clients="last", out=tmp_path / "run")
    initial = run.layout.views(run.state.weights.clone())
    run.fit()
    for k in range(4):
        model, _ = load_tensors(tmp_path / "run" / "kept" / f"round-000002-client-{k:06d}.safetensors")
        assert all(torch.equal(model[n], initial[n]) for n in HEAD)
        assert not torch.equal(model["stages.stage1.1.weight"], initial["stages.stage1.1.weight"])


def test_a_reset_head_meets_a_server_step_on_the_rest_only() -> None:
    run = own("Place:policy=reset+scaffold+fedavgm", rounds=2)
    run.fit()
    assert sorted(vector(run, run.state.server["fedavgm.v"])) == sorted(set(Plain(run).trained()) - set(HEAD))
