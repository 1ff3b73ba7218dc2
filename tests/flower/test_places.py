"""Addresses, processes and folders: what a user of a machine meets before any message is sent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from PIL import Image

from isofed.data import load
from isofed.errors import RunError, UserError
from isofed.flower import commands, terms
from isofed.flower.addresses import around_proxy, check_free, free_port, joined, near, split, why_not
from isofed.flower.control import Control
from isofed.flower.data import read_folder
from isofed.flower.keys import Keys, make_server_keys
from isofed.flower.local import run_folder
from isofed.flower.processes import Group
from isofed.flower.project import write_project
from isofed.flower.server_app import COMMAND
from isofed.flower.terms import Refusal


@contextmanager
def listening(keys: Keys | None = None) -> Iterator[tuple[int, list[bytes]]]:
    """A real server that takes connections, with TLS if it has keys; gives its port, and what it was sent first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if keys:
        context.load_cert_chain(keys.certificate, keys.private)
    heard: list[bytes] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as door:

        def serve() -> None:
            while True:
                try:
                    one, _ = door.accept()
                except OSError:
                    return
                with closing(one):
                    one.settimeout(5)
                    try:
                        if keys:
                            context.wrap_socket(one, server_side=True).close()
                        else:
                            heard.append(one.recv(100))
                    except OSError:
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield door.getsockname()[1], heard
        door.shutdown(socket.SHUT_RDWR)
    thread.join(5)


@pytest.mark.parametrize(
    ("address", "parts"),
    [("a.example:80", ("a.example", 80)), ("[::1]:8000", ("::1", 8000)), ("10.0.0.7:1", ("10.0.0.7", 1))],
)
def test_an_address_is_a_host_and_a_port(address: str, parts: tuple[str, int]) -> None:
    assert split(address) == parts
    assert joined(*parts) == address


@pytest.mark.parametrize(
    "address", ["localhost", "::1:8000", "https://a:80", "a:0", "a:65536", ":80", "a b:80", "a:", ""]
)
def test_what_is_no_address_is_said(address: str) -> None:
    with pytest.raises(UserError, match="is not the address of a server; give host:port"):
        split(address)


def test_a_server_on_all_addresses_is_reached_here() -> None:
    assert [near(host) for host in ("0.0.0.0", "::", "10.0.0.7")] == ["127.0.0.1", "::1", "10.0.0.7"]


def test_a_port_that_is_taken_is_named_before_a_start() -> None:
    """Otherwise the other program's answers would be taken for those of the new server."""
    check_free("127.0.0.1", free_port())
    with listening() as (port, _):
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(UserError, match=f"port {port} is in use"):
                check_free(host, port)
    with pytest.raises(UserError, match=r"192\.0\.2\.1 is no address of this machine"):
        check_free("192.0.2.1", free_port())
    with pytest.raises(UserError, match="there is no address"):
        check_free("no such host", 80)


def test_a_site_says_why_it_is_not_connected(tmp_path: Path) -> None:
    ours, others = make_server_keys(tmp_path / "ours"), make_server_keys(tmp_path / "others")
    assert "no server answers" in why_not(f"127.0.0.1:{free_port()}", ours.ca)
    with listening(ours) as (port, _):
        assert "does not let it in" in why_not(f"127.0.0.1:{port}", ours.ca)
        assert "keys/ca.crt must be the one of this server" in why_not(f"localhost:{port}", others.ca)
    with listening() as (port, _):
        assert "does not let it in" in why_not(f"127.0.0.1:{port}", None)


def test_this_machine_is_never_reached_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", "clinic.example")
    with listening() as (proxy, heard):
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy}")
        with Control(f"127.0.0.1:{free_port()}", None) as control, pytest.raises(RunError, match="no server answers"):
            control.stop_all()
    assert heard == []
    everything = {"no_proxy": "*"}
    around_proxy(everything)
    assert everything == {"no_proxy": "*"}


def gone(pid: int, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def in_foreground(home: Path, told: Connection) -> None:
    """What a server or a site does, with a child that only waits; tells the child's number, or what is wrong."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for what it starts in the background
    group = Group(home)
    try:
        commands._foreground(group, lambda: told.send(group.start("sleep", "60").pid))
    except UserError as error:
        told.send(str(error))


@pytest.mark.skipif(sys.platform != "linux", reason="what ends with its parent is the kernel's business")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_of_a_server_or_site_that_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    copies = multiprocessing.get_context("fork")
    ends = [copies.Pipe() for _ in range(2)]
    first, second = (copies.Process(target=in_foreground, args=(tmp_path / "site", end[1])) for end in ends)
    first.start()
    inner = ends[0][0].recv()
    second.start()
    assert "is in use by another process" in ends[1][0].recv()
    second.join(20)
    assert first.pid is not None
    os.kill(first.pid, number)
    first.join(20)
    assert not first.is_alive()
    assert gone(inner)


def test_a_process_works_in_its_folder_and_its_files_are_private(tmp_path: Path) -> None:
    group = Group(tmp_path / "home", tmp_path / "log", tmp_path)
    group.start(sys.executable, "-c", "import os; print(os.getcwd())").wait(20)
    assert (tmp_path / "log").read_text().strip() == str(tmp_path.resolve())
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700


def test_a_run_is_recorded_in_its_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a command is given; or a restarted server would begin anew in another folder."""
    write_project(tmp_path / "p", {"data": "digits", "out": "runs/one"})
    monkeypatch.chdir(tmp_path)
    assert run_folder(Path("p")) == tmp_path / "p" / "runs" / "one"
    monkeypatch.chdir(tmp_path / "p")
    assert os.path.samefile(run_folder(Path(".")).parent.parent, tmp_path / "p")


def pictures(folder: Path, **counts: int) -> Path:
    rng = np.random.default_rng(0)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            image = Image.fromarray(rng.integers(0, 256, (9, 7, 3), np.uint8))
            image.save(folder / name / f"{number}.png")
    return folder


def test_a_site_may_have_pictures_of_one_class_alone(tmp_path: Path) -> None:
    own = read_folder(pictures(tmp_path / "site", benign=10, malignant=0), (3, 8, 8))
    assert own.classes == ("benign",)
    assert (len(own.train), len(own.test), own.shape) == (8, 2, (3, 8, 8))


def test_a_sites_pictures_are_those_of_a_simulation(tmp_path: Path) -> None:
    for divided in (False, True):
        folder = tmp_path / str(divided)
        for part in ("train", "test") if divided else ("",):
            pictures(folder / part, a=7, b=6)
        for channels, name in ((1, "grey"), (3, "rgb")):
            site, simulated = read_folder(folder, (channels, 8, 8)), load(f"folder:size=8,channels={name}", str(folder))
            for one, other in ((site.train, simulated.train), (site.test, simulated.test)):
                assert one.images.equal(other.images)
                assert one.labels.equal(other.labels)


def test_a_site_may_have_a_table(tmp_path: Path) -> None:
    pictures(tmp_path / "site", a=8, b=12)
    lines = [f"{kind}/{n}.png,{kind},{kind}{n // 4}" for kind, count in (("a", 8), ("b", 12)) for n in range(count)]
    table = tmp_path / "site" / "scans.csv"
    table.write_text("\n".join(["picture,label,patient", *lines]))
    site, simulated = read_folder(table, (1, 8, 8)), load(f"{table}:size=8,channels=grey")
    assert site.name == simulated.name and site.classes == simulated.classes and len(site.test) == 4
    for one, other in ((site.train, simulated.train), (site.test, simulated.test)):
        assert one.images.equal(other.images) and one.labels.equal(other.labels)
        assert one.groups is not None and other.groups is not None and one.groups.equal(other.groups)
    table.write_text("\n".join(["picture,label", *lines[:8]]).replace(",a0", "").replace(",a1", ""))
    assert read_folder(table, (3, 8, 8)).classes == ("a",)  # one class will do
    table.write_text("\n".join(["file,finding,patient", *lines]))
    with pytest.raises(UserError, match=r"as in read_folder\(folder, shape, picture='NAME'\) in federation/data.py"):
        read_folder(table, (1, 8, 8))
    named = read_folder(table, (1, 8, 8), picture="file", label="finding")
    assert named.test.images.equal(simulated.test.images) and named.test.labels.equal(simulated.test.labels)
    beside = tmp_path / "plain"
    beside.mkdir()
    for n in range(8):
        (tmp_path / "site" / "a" / f"{n}.png").rename(beside / f"{n}.png")
    rows = [f"{n}.png,{'ab'[n % 2]}" for n in range(8)]
    (beside / "scans.csv").write_text("\n".join(["picture,label", *rows]))
    assert len(read_folder(beside, (1, 8, 8)).train) == 6
    for n in range(8):
        (beside / f"{n}.png").rename(tmp_path / "site" / "a" / f"{n}.png")
    whole = read_folder(table, (1, 8, 8), apart=False, picture="file", label="finding")
    assert len(whole.train) == 20 and len(whole.test) == 0


def test_a_site_is_told_what_is_lost_of_its_pictures(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "site", a=7, b=6)
    deep, scan = folder / "a" / "deep.png", folder / "b" / "scan.dcm"
    Image.fromarray(np.full((9, 7), 4000, dtype=np.uint16)).save(deep)
    scan.write_bytes(b"no picture")
    for _ in range(2):  # from the cache, too
        one, other = read_folder(folder, (3, 8, 8)).notes
        assert one.startswith(f"the file '{scan}' in a class folder is not read")
        assert other.startswith(f"the picture '{deep}' has 16 bits a channel")


def test_a_folder_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no folders with pictures"):
        read_folder(pictures(tmp_path / "empty", a=0), (3, 8, 8))
    with pytest.raises(Refusal, match="makes pictures square"):
        read_folder(pictures(tmp_path / "one", a=5), (3, 8, 16))
    (tmp_path / "one" / "a" / "0.png").write_text("junk")
    with pytest.raises(UserError, match="0.png' cannot be read"):
        read_folder(tmp_path / "one", (3, 8, 8))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"classes": "one"}, "names one class"),
        ({"classes": "a,b,a"}, "names 'a' twice"),
        ({"shape": "0,32,32"}, "must be channels, height and width"),
        ({"shape": "3,32.5,32"}, "must be channels, height and width"),
        ({"shape": "1,8,8", "mean": "0.5,0.5"}, "has 1 channels, so mean and std need 1 numbers each"),
        ({"std": "0.5,0,0.5"}, "each must be above 0"),
    ],
)
def test_impossible_pictures_are_said_before_anything_is_written(
    tmp_path: Path, changes: dict[str, str], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        write_project(tmp_path / "p", changes)
    assert not (tmp_path / "p").exists()
    assert terms.read(write_project(tmp_path / "grey", {"shape": "1,8,8"}))[1].mean == "0.5"


@pytest.mark.parametrize("lives", [True, False])
def test_a_server_app_that_cannot_be_interrupted_ends_with_its_command(lives: bool) -> None:
    command = subprocess.Popen(["sleep", "60"])
    if not lives:
        command.kill()
        command.wait()
    code = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); from isofed.flower import server_app as s; "
        "s.PATIENCE = 0.1; s.server(); print('up', flush=True); time.sleep(60)"
    )
    environment = os.environ | {COMMAND: str(command.pid)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as app:
        try:
            assert app.stdout is not None and (app.stdout.readline() == b"up\n" or not lives)
            if lives:
                time.sleep(0.5)
                assert app.poll() is None
                command.kill()
                command.wait()
            assert app.wait(20) == 1
        finally:
            for process in (command, app):
                process.kill()
                process.wait()
