"""Ray actors: how many there are, who trains whom and who dies on the way changes no bit."""

from __future__ import annotations

import copy
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isofed.collect import Collected, Partial
from isofed.engine import ray_actors
from isofed.engine.portable import arrays, pack, tensors
from isofed.engine.ray_actors import Cluster, RayActors, portions
from isofed.engine.serial import Serial
from isofed.errors import RunError, UserError
from isofed.federation import Federation
from isofed.methods import Method
from isofed.progress import Watcher
from tests.cli_tools import environment
from tests.engine.own_methods import HERE
from tests.engine.plain import small
from tests.run_tools import content, numbers

Make = Callable[[int], Cluster]
CORES = 9  # that Ray is told it has: three actors for most tests, and six that die
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (the extra 'ray')")


@pytest.fixture(scope="module")
def make() -> Iterator[Make]:
    """Makes clusters of so many actors, all on one Ray that the tests share: it takes seconds to start."""
    ray = ray_actors._ray()
    ray_actors._connect(ray, CORES)
    yield lambda count: Cluster(count)
    with ray_actors._quiet():
        ray.shutdown()


@pytest.fixture(scope="module")
def three(make: Make) -> Iterator[Cluster]:
    with make(3) as cluster:
        yield cluster


def first(cluster: Cluster, count: int) -> Cluster:
    """The same actors, or the first few of them."""
    few = copy.copy(cluster)
    few.actors = cluster.actors[:count]
    return few


def same(cluster: Cluster, *counts: int, **given: Any) -> list[Federation]:
    """Runs on so many actors, each compared with a serial one."""
    serial = small(**given)
    wanted = serial.fit()
    runs = []
    for count in counts:
        run = small(**given, executor="ray", pool=first(cluster, count))
        found = run.fit()
        assert content(run) == content(serial)
        assert numbers(run) == numbers(serial)
        assert found.exchanges == wanted.exchanges
        assert all(torch.equal(found.weights[k], wanted.weights[k]) for k in wanted.weights)
        runs.append(run)
    return runs


@needs_ray
def test_the_number_of_actors_changes_no_bit(three: Cluster) -> None:
    more = {"clients": 13, "participation": 0.7, "momentum": 0.9, "rounds": 3, "weighting": "samples"}
    same(three, 1, 2, 3, method="scaffold+fedavgm", data="synthetic:samples=300,test=1100,classes=4", **more)


@needs_ray
@pytest.mark.parametrize(
    "given",
    [
        {"method": "fedavg", "participation": 0.5},
        {"method": "fedbn", "model": "cnn", "persistent_momentum": True, "momentum": 0.9},
        {"method": f"{HERE}:Median+scaffold", "model": "cnn"},  # needs every client's update, and not their mean
        {"method": "krum+clip_update:0.5", "model": "cnn", "norm": "group:2"},
        {"method": f"{HERE}:Count+{HERE}:Echo", "clients": 5},  # questions after the last round
        {"method": "fedavg", "batch_size": 30, "last_batch": "drop"},  # some take no step
        {"method": "spherefed", "precision": "bf16", "augment": "flip", "validation": 0.2, "weighting": "uniform"},
    ],
    ids=lambda given: str(given["method"]).replace(HERE, ""),
)
def test_two_actors_give_the_bits_of_a_serial_run(three: Cluster, given: dict[str, Any]) -> None:
    same(three, 2, **given)


@needs_ray
@pytest.mark.parametrize("method", ["Spoil:client=1+scaffold", "Fail:client=2,place=gradient"])
def test_a_client_that_fails_is_an_event(three: Cluster, method: str) -> None:
    (run,) = same(three, 2, method=f"{HERE}:{method}")
    assert [len(line["events"]) for line in run.history] == [1, 1]


@needs_ray
def test_kept_models_are_the_same_files(three: Cluster, tmp_path: Path) -> None:
    given = {"keep": "every:1", "keep_clients": "every:2"}
    small(**given, out=tmp_path / "serial").fit()
    small(**given, executor="ray", pool=first(three, 2), out=tmp_path / "ray").fit()
    found, wanted = ({p.name: p.read_bytes() for p in (tmp_path / k / "kept").iterdir()} for k in ("ray", "serial"))
    assert found == wanted and len(found) == 2 + 4


@needs_ray
def test_each_actor_sends_one_sum_a_round(three: Cluster) -> None:
    run = small(clients=20, partition="iid", data="synthetic:samples=400,test=20,classes=4")
    jobs, _ = run._sample(1)
    executor = RayActors(run.world, run.device, shared=first(three, 2))
    news = [n for n in executor.train(jobs, run.state.weights, {}, run.state.clients.get) if isinstance(n, Partial)]
    assert sum(n.content is not None for n in news) == 2
    assert sum(n.answered for n in news) == 20
    collected = Collected(run.world, run.layout, jobs)
    for n in news:
        collected.add(n)
    assert collected.clients == collected.answered == 20


SILENT = """
from isofed import Method

class Silent(Method):
    exchanges = ("why",)

    def answer(self, exchange, visit):
        raise ValueError("no answer")
"""


class Heard(Watcher):
    def __init__(self) -> None:
        self.done: list[int] = []
        self.notes: list[str] = []

    def client(self, done: int, of: int) -> None:
        self.done.append(done)


def dying(flag: Path, more: str = "") -> dict[str, Any]:
    """The smallest of many clients, which comes last, kills whoever trains it, unless that is this process."""
    run = small(clients=9, data="synthetic:samples=300,test=20,classes=4")
    smallest = min(range(9), key=lambda c: len(run.world.clients[c]))
    method = f"{HERE}:Die:flag={flag},client={smallest},parent={os.getpid()}{more}+scaffold"
    return {"method": method, "clients": 9, "data": "synthetic:samples=300,test=20,classes=4"}


class Kill(Watcher):
    """Ends an actor after the first round."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def round(self, line: dict[str, Any]) -> None:
        if line["round"] == 1:
            self.cluster.ray.kill(self.cluster.actors[0])


@needs_ray
def test_actors_die_on_the_way(make: Make, tmp_path: Path) -> None:
    once, always = dying(tmp_path / "once"), dying(tmp_path / "always", ",always=true")
    serial = small(**once)
    serial.fit()
    with make(6) as cluster:
        # In the middle of a visit, holding the results of others: these are made again.
        run, heard = small(**once, executor="ray", pool=cluster), Heard()
        run.fit(heard)
        assert (tmp_path / "once").exists() and len(cluster.actors) == 5  # one was really killed
        assert content(run) == content(serial) and numbers(run) == numbers(serial)
        assert heard.done != sorted(heard.done) and heard.done[-1] == 9

        # Between two rounds, where it is noticed by whoever next asks it for something.
        run = small(**once, executor="ray", pool=cluster)
        run.fit(Kill(cluster))
        assert len(cluster.actors) == 4
        assert content(run) == content(serial) and numbers(run) == numbers(serial)

        # With all of its work done, but not sent.
        run, heard = small(**once), Heard()
        jobs, _ = run._sample(1)
        found, wanted = (Collected(run.world, run.layout, jobs) for _ in range(2))
        executor = RayActors(run.world, run.device, shared=cluster, note=heard.notes.append)
        sent = run.settings.method.send(run.state.server)
        for news in executor.train(jobs, run.state.weights, sent, run.state.clients.get):
            found.add(news)
            if found.answered == 9 and len(cluster.actors) == 4:
                cluster.ray.kill(cluster.actors[0])
        for outcome in Serial(run.world, run.device).train(jobs, run.state.weights, sent, run.state.clients.get):
            wanted.add(outcome)
        received = run.state.weights[run.layout.shared]
        assert torch.equal(found.combined(received)[0], wanted.combined(received)[0])
        assert sorted(found.states) == list(range(9))
        assert found.clients == found.answered == 9
        assert heard.notes == ["a Ray actor died and its work is done again; left: 3"]

        # Twice at the same client: this one is left out.
        run = small(**always, rounds=1, executor="ray", pool=cluster)
        run.fit()
        assert [e["event"] for e in run.history[0]["events"]] == ["was left out: two Ray actors died during its visit"]
        assert run.history[0]["clients"] == 8 and len(cluster.actors) == 1

        with pytest.raises(RunError, match="no Ray actor is left"):
            small(**always, executor="ray", pool=cluster).fit()
        assert not cluster.actors


@needs_ray
def test_what_an_actor_cannot_do_is_said_in_one_sentence(three: Cluster, tmp_path: Path, make: Make) -> None:
    class Silent(Method):
        """Of this session."""

        uniform = True

    with pytest.raises(UserError, match="a class of this session"):
        small(method=Silent(), executor="ray", pool=three).fit()
    with pytest.raises(UserError, match="the Ray cluster has 9 cores, and actors=99 needs one for each"):
        make(99)
    run = small(method=f"{HERE}:Noise")
    content, plain = pack(run.world)
    data, actor = arrays(content), three.actors[0]
    # As on a machine that has another version of the file, or none.
    with pytest.raises(RunError, match="own_methods.py is not the same file on the machine"):
        three.result(actor.set_up.remote(data, plain, {HERE: "0123"}, "cpu"))
    silent = tmp_path / "silent.py"
    silent.write_text(SILENT)
    said = r"^client \d has no answer to 'why': it failed with ValueError: no answer \(silent.py, line 8, in Silent"
    with pytest.raises(RunError, match=said):
        small(method=f"{silent}:Silent", rounds=1, executor="ray", pool=first(three, 1)).fit()
    plain["settings"]["method"] = [f"{tmp_path}/mine.py:Noise"]
    with pytest.raises(RunError, match="mine.py, which does not exist"):
        three.result(actor.set_up.remote(data, plain, {}, "cpu"))


def read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # a process of somebody else's, or one that has just ended
        return b""


@needs_ray
def test_a_cluster_that_is_not_there_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(RunError, match="no Ray cluster answers at RAY_ADDRESS=127.0.0.1:"):
            ray_actors._connect(ray_actors._ray(), 2)
        assert time.monotonic() - began < 12


@needs_ray
@pytest.mark.slow
def test_a_run_starts_its_own_ray_and_ctrl_c_ends_both(tmp_path: Path) -> None:
    command = ["run", "executor=ray", "actors=2", "data=synthetic:samples=4000,test=20", "rounds=500", "clients=4"]
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "isofed.cli", *command, f"out={out}"],
        env=environment() | {"ISOFED_TEST": str(out)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)  # a visit that is under way is not waited for
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    left = [p for p in Path("/proc").glob("[0-9]*") if f"ISOFED_TEST={out}".encode() in read(p / "environ")]
    assert not left
    # Nothing of Ray's own start and end shows.
    assert all(line.startswith(("fedavg on", "round", "isofed: stopped")) for line in said.splitlines()), said
    assert Federation.resume(out, executor="serial").folder is not None


# What needs no Ray


def test_without_ray_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"^executor=ray needs Ray: pip install 'ray>=[\d.]+'$"):
        small(executor="ray", actors=2).fit()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 1000), max_size=200), st.integers(1, 16), st.integers(1, 20))
def test_portions_deal_everybody_out_once(work: list[int], actors: int, at_least: int) -> None:
    made = portions(work, actors, at_least)
    dealt = [place for portion in made for place in portion]
    assert Counter(dealt) == Counter(range(len(work)))
    assert [work[place] for place in dealt] == sorted(work, reverse=True)
    assert len(made) >= min(actors, len(work))  # nobody is left without
    if at_least == 1:  # none is more than its share of what was left, unless it is a single client
        left = sum(work)
        for portion in made:
            own = sum(work[place] for place in portion)
            assert len(portion) == 1 or own <= left / (2 * actors)
            left -= own


def test_a_slow_actor_does_not_stall_the_others() -> None:
    # Free actors take the next portion; one of four works at a third of the speed. The best division would take 300.
    work, speed = [1] * 1000, [3, 3, 3, 1]
    free = [0.0] * 4
    for portion in portions(work, 4):
        who = int(np.argmin(free))
        free[who] += 3 * len(portion) / speed[who]
    assert max(free) < 1.3 * 300


def test_tensors_of_any_type_survive_the_journey() -> None:
    types = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
    given = {str(t): torch.tensor([0, 1, 3]).to(t) for t in types}
    given |= {"none": torch.empty(0, 3), "one": torch.tensor(2.5), "odd": torch.randn(4, 6).t()[::2]}
    sent = arrays([given, None, (1, "two")])
    for packed in sent[0].values():
        packed.data.flags.writeable = False  # as in Ray's object store
    for device in (None, torch.device("cpu")):
        found, nothing, plain = tensors(sent, device)
        assert nothing is None and plain == (1, "two")
        for name, value in given.items():
            assert found[name].dtype == value.dtype and torch.equal(found[name], value)
    found["one"].fill_(0)  # a copy is one's own
    assert given["one"] == 2.5
