"""What goes wrong at a client must not go wrong elsewhere; and every place of a round works on both executors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from isofed.engine.workers import Pool
from isofed.errors import RunError, UserError
from isofed.federation import Federation
from isofed.layout import Policy
from isofed.methods import Method
from tests.engine.own_methods import HERE
from tests.engine.plain import TOLERANCE, Named, Plain, distance, mean, small, vector

BOTH = pytest.mark.parametrize("executor", ["serial", "workers"])


def own(name: str, pool: Pool | None = None, executor: str = "serial", **settings: Any) -> Federation:
    return small(method=f"{HERE}:{name}", executor=executor, pool=pool, **settings)


# Clients that fail


@BOTH
def test_nan_at_one_client_is_recorded_and_left_out(executor: str, two_workers: Pool) -> None:
    run = own("Spoil:client=1", two_workers, executor)
    result = run.fit()
    assert [line["events"] for line in result.history] == [
        [{"client": 1, "event": "gave NaN or numbers out of range"}]
    ] * 2
    assert [line["clients"] for line in result.history] == [3, 3]
    assert result.events == 2
    assert sorted(run.state.clients) == [0, 2, 3]  # what it remembered was not taken over
    assert all(float(s["spoil.visits"]) == 2 for s in run.state.clients.values())
    # The others are averaged as if it had never been asked.
    plain = Plain(run)
    server = plain.start()
    for round in (1, 2):
        models = [plain.local(server, round, k)[0] for k in (0, 2, 3)]
        server = mean(models, [float(plain.sizes[k]) for k in (0, 2, 3)])
    assert distance(result.weights, server) < TOLERANCE
    assert all(np.isfinite(line["local_loss"]) for line in result.history)


def test_a_failure_later_on_leaves_the_state_of_before() -> None:
    run = own("Spoil:client=1,since=2+scaffold", rounds=3)
    early = own("Spoil:client=1,since=2+scaffold", rounds=1)
    run.fit(), early.fit()
    assert float(run.state.clients[1]["spoil.visits"]) == 1
    assert torch.equal(run.state.clients[1]["scaffold.ck"], early.state.clients[1]["scaffold.ck"])
    assert [len(line["events"]) for line in run.history] == [0, 1, 1]
    # The server's c is still the mean of what the clients hold.
    shares = run.world.fractions()
    wanted = sum(shares[k] * s["scaffold.ck"].double() for k, s in run.state.clients.items())
    torch.testing.assert_close(run.state.server["scaffold.c"].double(), wanted, rtol=1e-5, atol=1e-7)


@BOTH
def test_all_clients_failing_ends_the_run_with_a_reason(executor: str, one_worker: Pool) -> None:
    with pytest.raises(RunError, match=r"round 2 has no client left to average: client \d gave NaN"):
        own("Spoil:every=true,since=2", one_worker, executor, rounds=3).fit()


def test_numbers_out_of_range_are_refused_like_nan() -> None:
    class Huge(Method):
        def gradient(self, step: Any) -> None:
            step.grad.fill_(1e20)

    with pytest.raises(RunError, match="gave NaN or numbers out of range"):
        small(method=Huge()).fit()


@BOTH
@pytest.mark.parametrize("place", ["begin", "gradient", "end"])
def test_an_exception_in_a_visit_is_an_event(place: str, executor: str, two_workers: Pool) -> None:
    run = own(f"Fail:client=2,place={place}", two_workers, executor, rounds=2)
    result = run.fit()
    event = {"client": 2, "event": f"failed with ValueError: broken in {place}"}
    assert [line["events"] for line in result.history] == [[event]] * 2
    # What came before it in the same replica leaves no trace in what comes after.
    plain = Plain(run)
    server = plain.start()
    for round in (1, 2):
        server = mean([plain.local(server, round, k)[0] for k in (0, 1, 3)], [float(plain.sizes[k]) for k in (0, 1, 3)])
    assert distance(result.weights, server) < TOLERANCE


def test_a_killed_worker_is_replaced_and_the_visit_repeated(tmp_path: Path, two_workers: Pool) -> None:
    flag = tmp_path / "flag"
    run = own(f"Die:flag={flag},client=1,parent={os.getpid()}+scaffold", two_workers, "workers", model="cnn")
    result = run.fit()
    assert flag.exists()  # it really was killed
    assert result.events == 0
    calm = small(method="scaffold", model="cnn")
    calm.fit()
    assert run.state.weights.numpy().tobytes() == calm.state.weights.numpy().tobytes()
    assert torch.equal(run.state.clients[1]["scaffold.ck"], calm.state.clients[1]["scaffold.ck"])


def test_a_client_that_kills_every_worker_is_left_out(tmp_path: Path, two_workers: Pool) -> None:
    text = f"Die:flag={tmp_path / 'flag'},client=1,parent={os.getpid()},always=true"
    result = own(text, two_workers, "workers", rounds=1).fit()
    assert result.history[0]["events"] == [{"client": 1, "event": "its worker process was killed (signal 9)"}]
    assert result.history[0]["clients"] == 3
    assert own("Noise", two_workers, "workers", rounds=1).fit().events == 0  # and the pool is still of use


def split(tmp_path: Path, lists: list[list[int]]) -> str:
    (tmp_path / "split.json").write_text(json.dumps(lists))
    return f"from_file:{tmp_path / 'split.json'}"


@BOTH
def test_clients_without_data_are_an_event(executor: str, tmp_path: Path, one_worker: Pool) -> None:
    parts = [list(range(0, 40)), [], list(range(40, 100)), []]
    run = small(partition=split(tmp_path, parts), executor=executor, pool=one_worker, method="scaffold")
    result = run.fit()
    for line in result.history:
        assert line["events"] == [{"client": c, "event": "has no data"} for c in (1, 3)]
        assert line["clients"] == 2
    assert sorted(run.state.clients) == [0, 2]
    assert run.world.fractions().tolist() == [0.4, 0, 0.6, 0]
    uniform = small(partition=split(tmp_path, parts), weighting="uniform")
    assert uniform.world.fractions().tolist() == [0.5, 0, 0.5, 0]


def test_only_empty_clients_in_a_round_ends_it_with_a_reason(tmp_path: Path) -> None:
    run = small(partition=split(tmp_path, [[], [], [], list(range(100))]), participation=0.25, rounds=4)
    with pytest.raises(RunError, match=r"round \d has no client left to average: client \d has no data"):
        run.fit()


def test_a_client_that_cannot_take_a_step_is_told_of(tmp_path: Path) -> None:
    # With last_batch=drop and fewer samples than a batch a client never trains, yet it counts in every mean.
    run = small(
        partition=split(tmp_path, [list(range(5)), list(range(5, 100))]), clients=None, last_batch="drop", rounds=1
    )
    line = run.fit().history[0]
    assert line["steps"] == 2 * (95 // 16)
    assert {"client": 0} in [{"client": e["client"]} for e in line["events"]]


# The server


@pytest.mark.parametrize("error", ["interrupt", "value"])
@pytest.mark.parametrize("place", ["evaluated", "aggregate"])
def test_an_interruption_at_the_server_loses_nothing(place: str, error: str, tmp_path: Path) -> None:
    text = f"{HERE}:Stop:flag={tmp_path / 'flag'},round=2,error={error},place={place}+fedavgm+scaffold"
    run = small(method=text, rounds=2, out=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt if error == "interrupt" else ValueError):
        run.fit()
    assert (run.round, len(run.history)) == (1, 1)
    again = Federation.resume(tmp_path / "run")
    result = again.fit()
    whole = small(method=text, rounds=2)  # the flag is set by now
    wanted = whole.fit()
    assert [line["round"] for line in result.history] == [1, 2]
    assert (result.accuracy, result.rounds, result.bytes_up) == (wanted.accuracy, 2, wanted.bytes_up)
    assert again.state.weights.numpy().tobytes() == whole.state.weights.numpy().tobytes()
    for key, value in whole.state.server.items():
        assert torch.equal(again.state.server[key], value), key


def test_a_server_step_that_fails_leaves_the_state_of_before(tmp_path: Path) -> None:
    text = f"{HERE}:Explode:flag={tmp_path / 'flag'},round=3+fedavgm"
    run = small(method=text, rounds=4, out=tmp_path / "run")
    with pytest.raises(RunError, match="the server step of round 3 gave NaN or numbers out of range"):
        run.fit()
    assert run.round == 2
    assert float(run.state.server["explode.rounds"]) == 2
    again = Federation.resume(tmp_path / "run")
    again.fit()
    whole = small(method=text, rounds=4)
    whole.fit()
    assert again.state.weights.numpy().tobytes() == whole.state.weights.numpy().tobytes()
    assert float(again.state.server["explode.rounds"]) == 4


# Places of a round, each by a small method of one's own


@BOTH
def test_combine_by_the_median(executor: str, two_workers: Pool) -> None:
    run = own("Median", two_workers, executor, model="cnn", rounds=2)
    found = run.fit().weights
    plain = Plain(run)
    server, names = plain.start(), plain.trained()
    statistics = [n for n, b in plain.network.named_buffers() if b.is_floating_point()]
    for round in (1, 2):
        models = [plain.local(server, round, k)[0] for k in range(4)]
        # Running statistics too: what clients send beside their weights must not go around the combination.
        server |= {k: torch.stack([m[k] for m in models]).quantile(0.5, dim=0) for k in [*names, *statistics]}
    assert distance(found, server) < TOLERANCE


@BOTH
def test_a_question_after_the_last_round(executor: str, two_workers: Pool) -> None:
    run = own("Count:factor=3", two_workers, executor, rounds=1)
    result = run.fit()
    labels = run.world.parts["train"].labels
    wanted = 3 * torch.bincount(labels, minlength=4).double() / len(labels)
    torch.testing.assert_close(result.weights["head.bias"].double(), wanted, rtol=1e-6, atol=0)
    plain = small(rounds=1).fit().weights
    assert all(torch.equal(result.weights[n], plain[n]) for n in plain if n != "head.bias")
    (line,) = result.exchanges
    assert line["exchange"] == "count"
    assert line["bytes_up"] == 4 * (4 + 1) * 4  # four clients, five numbers of four bytes
    assert result.accuracy == line["accuracy"] != result.history[-1]["accuracy"]


def test_answers_do_not_change_what_is_trained_or_remembered() -> None:
    with_question, without = own("Count+scaffold"), small(method="scaffold")
    with_question.fit(), without.fit()
    assert torch.equal(with_question.state.weights, without.state.weights)
    for k in range(4):
        assert torch.equal(with_question.state.clients[k]["scaffold.ck"], without.state.clients[k]["scaffold.ck"])


@pytest.mark.parametrize("others", ["", "+feddyn:alpha=0.2", "+fedavgm"])
def test_the_final_model_is_the_one_after_all_questions(others: str, tmp_path: Path) -> None:
    run = small(method=f"{HERE}:Count+{HERE}:Twice{others}", rounds=2, out=tmp_path / "run")
    result = run.fit()
    labels = run.world.parts["train"].labels
    wanted = 2 * torch.bincount(labels, minlength=4).double() / len(labels)
    torch.testing.assert_close(result.weights["head.bias"].double(), wanted, rtol=1e-6, atol=0)
    assert [e["exchange"] for e in result.exchanges] == ["count", "twice"]
    plain = Plain(run)
    inputs, truth = plain.part("test")
    plain.network.load_state_dict({k: v.double() for k, v in result.weights.items()})
    plain.network.eval()
    right = (plain.network(inputs).logits.argmax(1) == truth).double().mean()
    assert result.accuracy == pytest.approx(float(right))
    from isofed.files import load_tensors

    stored, _ = load_tensors(tmp_path / "run" / "model.safetensors")
    assert torch.equal(stored["head.bias"], result.weights["head.bias"])


def test_questions_are_asked_once_however_often_the_run_is_taken_up(tmp_path: Path) -> None:
    text = f"{HERE}:Count+{HERE}:Twice"
    whole = small(method=text, rounds=2, out=tmp_path / "one").fit()
    run = small(method=text, rounds=2, out=tmp_path / "two")
    run.fit()
    (tmp_path / "two" / "result.json").unlink()  # killed just before the end
    (tmp_path / "two" / "model.safetensors").unlink()
    again = Federation.resume(tmp_path / "two").fit()
    assert torch.equal(again.weights["head.bias"], whole.weights["head.bias"])
    assert again.accuracy == whole.accuracy


def test_an_answer_that_fails_says_so() -> None:
    class Silent(Method):
        exchanges = ("why",)

        def answer(self, exchange: str, visit: Any) -> Any:
            raise ValueError("no answer")

    with pytest.raises(RunError, match="no answer"):
        small(method=Silent(), rounds=1).fit()


@BOTH
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_frozen_copies(model: str, executor: str, two_workers: Pool) -> None:
    import copy

    run = own("Near:strength=0.5", two_workers, executor, model=model, rounds=3, participation=0.75)
    found = run.fit().weights
    from tests.engine.plain import participants

    plain = Plain(run)
    server, last = plain.start(), dict[int, Named]()
    for round in (1, 2, 3):
        who = participants(run, round)
        models = []
        for k in who:
            frozen = []
            for weights in (server, last.get(k, server)):
                plain.network.load_state_dict(weights)
                frozen.append(copy.deepcopy(plain.network).eval())
            net = plain.network
            net.load_state_dict(server)
            net.train()
            optimiser = torch.optim.SGD(net.parameters(), lr=run.settings.lr)
            for inputs, labels in plain.batches(round, k):
                output = net(inputs)
                with torch.no_grad():
                    targets = [f(inputs).features for f in frozen]
                near = [(output.features - t).square().mean() for t in targets]
                loss = cross_entropy(output.logits, labels) + 0.5 * (near[0] + 2 * near[1])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            last[k] = plain.start()
            models.append(last[k])
        server = mean(models, [float(plain.sizes[k]) for k in who])
    assert distance(found, server) < TOLERANCE
    assert distance(found, small(model=model, rounds=3, participation=0.75).fit().weights) > 1e-4


def test_soft_labels_and_planned_draws() -> None:
    run = own("Mix", rounds=1, clients=1, partition="iid")
    found = run.fit().weights
    plain = Plain(run)
    net = plain.network
    data = plain.batches(1, 0)
    weights = np.linspace(0.6, 0.9, len(data), dtype=np.float32)
    net.train()
    optimiser = torch.optim.SGD(net.parameters(), lr=run.settings.lr)
    for (inputs, labels), weight in zip(data, weights.tolist(), strict=True):
        hot = one_hot(labels, 4).double()
        mixed, soft = (weight * t + (1 - weight) * t.flip(0) for t in (inputs, hot))
        optimiser.zero_grad()
        (-(soft * net(mixed).logits.log_softmax(1)).sum(1).mean()).backward()
        optimiser.step()
    assert distance(found, plain.start()) < TOLERANCE


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_two_passes_around_a_step(momentum: float) -> None:
    run = own("Ascend:rho=0.1", rounds=1, clients=1, partition="iid", momentum=momentum)
    found = run.fit().weights
    plain = Plain(run)
    net = plain.network
    net.train()
    parameters = list(net.parameters())
    optimiser = torch.optim.SGD(parameters, lr=run.settings.lr, momentum=momentum)
    for inputs, labels in plain.batches(1, 0):
        first = torch.autograd.grad(cross_entropy(net(inputs).logits, labels), parameters)
        norm = torch.cat([g.reshape(-1) for g in first]).norm()
        with torch.no_grad():
            for p, g in zip(parameters, first, strict=True):
                p.add_(0.1 * g / norm)
        optimiser.zero_grad()
        cross_entropy(net(inputs).logits, labels).backward()
        with torch.no_grad():
            for p, g in zip(parameters, first, strict=True):
                p.sub_(0.1 * g / norm)
        optimiser.step()
    assert distance(found, plain.start()) < TOLERANCE


# Policies

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


def test_a_domain_without_test_pictures_does_not_stop_the_run() -> None:
    from isofed.data import Dataset, Part, load

    base = load("synthetic:samples=90,test=60,classes=3,domains=3")
    assert base.test.domains is not None
    kept = (base.test.domains != 2).nonzero()[:, 0].numpy()
    data = Dataset.build("two", base.classes, base.train, base.test.subset(kept), domains=base.domains)
    assert isinstance(data.train, Part)
    for method in ("fedavg", "fedbn"):
        run = small(dataset=data, method=method, model="cnn", partition="domain", clients=3, rounds=1)
        assert 0 <= run.fit().accuracy <= 1


def test_refused_before_any_work() -> None:
    with pytest.raises(UserError, match="batch_size=1 cannot train batch norm"):
        small(model="cnn", batch_size=1)
    small(model="cnn", norm="group:2", batch_size=1)
    with pytest.raises(UserError, match="crop"):
        small(augment="crop:8")  # the pictures are 8 x 8
