"""Real processes on this machine: a server and sites with TLS and keys, and strangers who want in.

The first test belongs to the ordinary ones. The others take minutes, and run with ``make test-deploy``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from isofed import Federation, RunError
from isofed.files import load_tensors
from isofed.flower import terms
from isofed.flower.addresses import free_port
from isofed.flower.control import Control
from isofed.flower.keys import Keys, make_server_keys, make_site_key
from isofed.flower.local import Local
from isofed.flower.processes import BIN, Group, start_site, stop
from isofed.flower.project import read_table, write_project
from tests.flower.strangers import check_strangers

deploy = pytest.mark.skipif("ISOFED_DEPLOY" not in os.environ, reason="takes minutes: make test-deploy")

TABLE: dict[str, Any] = {
    "data": "synthetic:samples=240,test=60,classes=4",
    "partition": "dirichlet:0.5",
    "model": "mlp",
    "method": "scaffold",
    "rounds": 2,
    "local_epochs": 1,
    "deadline": 120.0,
}


def project(folder: Path, **changes: Any) -> dict[str, Any]:
    return write_project(folder / "app", TABLE | {"clients": 2, "out": str(folder / "run")} | changes)


def check_equal(folder: Path, table: dict[str, Any]) -> None:
    """The model in a run folder is that of the simulation, bit by bit."""
    here = Federation(**terms.read(table)[0].to_dict()).fit()
    there, _ = load_tensors(folder / "model.safetensors")
    for name, value in here.weights.items():
        assert there[name].equal(value), name


def test_two_sites_train_as_the_simulation_does_and_strangers_are_kept_out(tmp_path: Path) -> None:
    table = project(tmp_path)
    with Local(tmp_path / "app", tmp_path / "work") as local:
        assert local.run() == tmp_path / "run"
        check_equal(tmp_path / "run", table)
        assert local.keys is not None
        check_strangers(f"https://{local.address}", local.keys.ca, *ids(local))
        check_control(local.address, tmp_path)
    assert (tmp_path / "run" / "result.json").exists()
    assert not any(group.running for group in (local.server, *local.groups))


def ids(local: Local) -> tuple[int, int]:
    """Those of a node and of the run."""
    from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest

    with local.control() as control:
        nodes, runs = control._client.ListNodes(ListNodesRequest()), control._client.ListRuns(ListRunsRequest())
    return nodes.nodes_info[0].node_id, next(iter(runs.run_dict))


def check_control(address: str, folder: Path) -> None:
    """Another federation's keys do not open this one."""
    other = make_server_keys(folder / "other")
    with Control(address, other) as control, pytest.raises(RunError, match="no server answers"):
        control.stop_all()


@deploy
@pytest.mark.parametrize("sites", [2, 5])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedavg+feduv", "fedbn", "fednova+spherefed"])
def test_sites_with_keys_end_with_the_bits_of_the_simulation(tmp_path: Path, method: str, sites: int) -> None:
    more = {"model": "cnn", "norm": "batch"} if method == "fedbn" else {}
    table = project(tmp_path, method=method, clients=sites, data="digits", **more)
    with Local(tmp_path / "app", tmp_path / "work") as local:
        local.run()
    check_equal(tmp_path / "run", table)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """A server with two sites that are let in and not started."""
    folder = tmp_path_factory.mktemp("server")
    project(folder)
    local = Local(folder / "app", folder / "work")
    local.keys = make_server_keys(folder / "work" / "keys")
    for number in range(2):
        make_site_key(folder / "work" / "keys", local.name(number))
    try:
        local.start_server()
        yield local
    finally:
        local.stop()


REFUSED = {
    "no key": "activate|401|auth|refus|register",
    "an unregistered key": "activate|401|auth|No SuperNode|refus",
    "the wrong authority": "certificate|SSL|verif|Connection|connect",
    "plaintext": "Connection|connect|protocol|disconnect",
}


@deploy
@pytest.mark.parametrize("why", REFUSED)
def test_a_node_is_refused(server: Local, tmp_path: Path, why: str) -> None:
    keys, log = server.keys, tmp_path / "log"
    assert keys is not None
    words = ["--superlink", server.address, "--port", str(free_port()), "--max-retries", "2"]
    if why == "no key":
        words += ["--root-certificates", str(keys.ca)]
    elif why == "an unregistered key":
        words += ["--root-certificates", str(keys.ca)]
        words += ["--auth-supernode-private-key", str(make_site_key(tmp_path, "stranger"))]
    elif why == "the wrong authority":
        words += ["--root-certificates", str(make_server_keys(tmp_path / "other").ca)]
        words += ["--auth-supernode-private-key", str(keys.site("site-0"))]
    else:
        words += ["--insecure"]
    group = Group(tmp_path / "home", log)
    try:
        process = group.start(BIN / "flower-supernode", *words)
        end = time.monotonic() + 40
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
        text = log.read_text()
        assert "SuperNode ID" not in text, "it was let in"
        assert online(server) == 0
    finally:
        stop(group)
    assert re.search(REFUSED[why], text), text


def online(local: Local) -> int:
    """Nodes that are connected to a server."""
    from flwr.proto.control_pb2 import ListNodesRequest

    with local.control() as control:
        return sum(node.status == "online" for node in control._client.ListNodes(ListNodesRequest()).nodes_info)


@deploy
def test_a_registered_site_is_let_in(server: Local, tmp_path: Path) -> None:
    """The counterpart of the refusals: with its key and the right authority a node is connected."""
    group = Group(tmp_path / "home", tmp_path / "log")
    try:
        start_site(group, server.keys, server.address, "site-0", {"partition-id": 0, "name": "site-0"})
        end = time.monotonic() + 40
        while online(server) == 0 and time.monotonic() < end:
            time.sleep(0.2)
        assert online(server) == 1
    finally:
        stop(group)


@deploy
def test_a_killed_site_has_its_state_back_and_a_killed_server_goes_on(tmp_path: Path) -> None:
    table = project(tmp_path, rounds=6, deadline=25.0, min_clients=1, patience=120.0)
    metrics = tmp_path / "run" / "metrics.jsonl"

    def rounds() -> int:
        return metrics.read_text().count("\n") if metrics.exists() else 0

    with Local(tmp_path / "app", tmp_path / "work") as local:
        with local.control() as control:
            control.start(local.app)
            while rounds() < 2:
                time.sleep(0.2)
        local.groups[1].kill()
        local.server.kill()
        local.start_server()
        local.start_site(1)
        local.run()
    lines = Federation.resume(tmp_path / "run").folder.metrics()  # type: ignore[union-attr]
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 6]
    if all(len(line["sites"]) == 2 for line in lines):  # nobody missed a deadline meanwhile
        check_equal(tmp_path / "run", table)


@deploy
@pytest.mark.parametrize("how", ["with keys", "--insecure"])
def test_up_is_one_command(tmp_path: Path, how: str) -> None:
    words = [f"{k}={v}" for k, v in (TABLE | {"clients": 2, "out": str(tmp_path / "run")}).items()]
    command = [sys.executable, "-m", "isofed", "flower", "up", *words, *(["--insecure"] if how == "--insecure" else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "round 2: 2 sites, accuracy" in done.stdout
    assert ("nothing is encrypted" in done.stdout) == (how == "--insecure")
    check_equal(tmp_path / "run", TABLE | {"clients": 2, "out": str(tmp_path / "run")})


@deploy
def test_the_commands_of_the_readme(tmp_path: Path) -> None:
    """Keys made at the site and on the server's machine, three processes in the foreground, and a run."""

    def isofed(*words: str | Path, wait: bool = True) -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("ab") as log:
            command = [sys.executable, "-m", "isofed", "flower", *map(str, words)]
            made = subprocess.Popen(command, stdout=log, stderr=log)
        if wait:
            assert made.wait(240) == 0, (tmp_path / "log").read_text()
        return made

    app, port = tmp_path / "app", free_port()
    values = TABLE | {"clients": 2, "out": str(tmp_path / "run")}
    isofed("new", app, *(f"{k}={v}" for k, v in values.items()))
    isofed("keys", app, "--host", "127.0.0.1")
    for name in ("north", "south"):
        isofed("keys", app, "--site", name)
    running = [isofed("server", app, "--port", str(port), wait=False)]
    try:
        for number, name in enumerate(("north", "south")):
            at = ("--number", str(number), "--name", name, "--server", f"127.0.0.1:{port}")
            running.append(isofed("site", app, *at, wait=False))
        with Control(f"127.0.0.1:{port}", Keys(app / "keys")) as control:
            end = time.monotonic() + 60
            while not control.reachable() and time.monotonic() < end:
                time.sleep(0.5)
        isofed("start", app, "--server", f"127.0.0.1:{port}")
    finally:
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in running:
            process.wait(30)
    check_equal(tmp_path / "run", read_table(app))
