"""Getting data sets: every way a server or a disk can misbehave, on this machine alone."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from isofed import commands
from isofed.data import download
from isofed.data.download import Offer, Remote, fetch, get
from isofed.errors import RunError, UserError
from tests.cli_tools import complaint, isofed
from tests.data.archive_tools import file, tar_of

CONTENT = bytes(range(256)) * 4096  # 1 MiB


class Server(ThreadingHTTPServer):
    """Serves files from memory, as well or as badly as ``behave`` says."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.behave: list[str] = []  # one word for each request to come; then it behaves well
        self.asked: list[str] = []  # the Range of each request

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        how = self.server.behave.pop(0) if self.server.behave else ""
        asked = self.headers.get("Range", "")
        self.server.asked.append(asked)
        content = self.server.files.get(self.path.lstrip("/"))
        if content is None or how.isdigit():
            self.send_error(404 if content is None else int(how))
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and "no ranges" not in how else 0
        if start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            said = 0 if "other range" in how else start
            self.send_header("Content-Range", f"bytes {said}-{len(content) - 1}/{len(content)}")
        if "no length" not in how:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        rest = content[start:]
        self.wfile.write(rest[: 300_000 if "breaks" in how else 0 if "silent" in how else None])
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "ISOFED_MIRROR", "ISOFED_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(download, "_wait", lambda seconds: None)
    with Server() as made:
        made.files["file.bin"] = CONTENT
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def remote(server: Server, name: str = "file.bin", megabytes: float = 1.1) -> Remote:
    content = server.files.get(name, CONTENT)
    return Remote(server.url(name), hashlib.md5(content).hexdigest(), megabytes)


# Files


def test_a_file_comes_whole_and_progress_is_told(server: Server, tmp_path: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    fetch(remote(server), tmp_path / "file.bin", lambda *now: told.append(now))
    assert (tmp_path / "file.bin").read_bytes() == CONTENT and os.listdir(tmp_path) == ["file.bin"]
    assert told[-1] == ("file.bin", len(CONTENT), len(CONTENT)) and [t[1] for t in told] == sorted(t[1] for t in told)
    fetch(remote(server), tmp_path / "file.bin")
    assert server.asked == [""], "what is there and sound is not asked for again"
    (tmp_path / "file.bin").write_bytes(b"something else")
    fetch(remote(server), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("behave", "asked"),
    [
        ([], ["bytes=1000-"]),
        (["no ranges"], ["bytes=1000-"]),
        (["no length no ranges"], ["bytes=1000-"]),
        (["breaks", "breaks", "breaks"], ["bytes=1000-", "bytes=301000-", "bytes=601000-", "bytes=901000-"]),
        (["breaks no ranges", "no ranges"], ["bytes=1000-", "bytes=300000-"]),
        (["silent", "503", "429"], ["bytes=1000-"] * 4),
    ],
)
def test_a_download_goes_on_where_it_was(behave: list[str], asked: list[str], server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    server.behave = behave
    fetch(remote(server), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT and os.listdir(tmp_path) == ["file.bin"]
    assert server.asked == asked


def test_a_part_that_is_whole_already_needs_nothing_more(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    fetch(remote(server), tmp_path / "file.bin")
    assert server.asked == [f"bytes={len(CONTENT)}-"] and os.listdir(tmp_path) == ["file.bin"]


def test_a_part_longer_than_the_file_is_begun_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT + b"more")
    fetch(remote(server), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_connection_that_never_holds_ends_in_a_sentence(server: Server, tmp_path: Path) -> None:
    server.behave = ["breaks"] + ["silent"] * 20
    with pytest.raises(RunError, match=r"the connection broke after 0\.3 of 1\.0 MB \(5 tries\); 0\.3 MB are kept"):
        fetch(remote(server), tmp_path / "file.bin")
    assert (tmp_path / "file.bin.part").read_bytes() == CONTENT[:300_000]
    server.behave = []
    fetch(remote(server), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_server_that_is_not_there_ends_in_a_sentence(server: Server, tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as closed:
        port = closed.server_port
    with pytest.raises(RunError, match=r"cannot be downloaded: .*refused.* \(5 tries\)$"):
        fetch(Remote(f"http://127.0.0.1:{port}/file.bin", "0" * 32, 1), tmp_path / "file.bin")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("code", ["403", "410"])
def test_a_refusal_is_not_asked_again(code: str, server: Server, tmp_path: Path) -> None:
    server.behave = [code] * 3
    with pytest.raises(RunError, match=f"cannot be downloaded: the server answers {code}"):
        fetch(remote(server), tmp_path / "file.bin")
    assert len(server.asked) == 1
    with pytest.raises(RunError, match="the server answers 404 Not Found"):
        fetch(remote(server, "missing.bin"), tmp_path / "missing.bin")


def test_a_wrong_checksum_removes_the_file(server: Server, tmp_path: Path) -> None:
    wrong = Remote(server.url("file.bin"), "0" * 32, 1.1)
    with pytest.raises(RunError, match="is not the file that was published .* it was removed, try again"):
        fetch(wrong, tmp_path / "file.bin")
    assert os.listdir(tmp_path) == []


def test_another_part_than_was_asked_for_is_not_taken(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    server.behave = ["other range"]
    with pytest.raises(RunError, match="another part of the file than was asked for"):
        fetch(remote(server), tmp_path / "file.bin")


@pytest.mark.parametrize("behave", ["", "no length"])
def test_a_file_far_too_large_is_not_taken(behave: str, server: Server, tmp_path: Path) -> None:
    server.behave = [behave]
    with pytest.raises(RunError, match="far more than was published"):
        fetch(remote(server, megabytes=0.05), tmp_path / "file.bin")


def test_without_room_nothing_is_downloaded(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"no room for file.bin in .*: it needs [\d,]+ MB, [\d,]+ MB are free"):
        fetch(remote(server), tmp_path / "file.bin", room=1 << 60)
    assert os.listdir(tmp_path) == []

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(RunError, match="cannot write .*file.bin.part: the disk or the quota is full"):
        fetch(remote(server), tmp_path / "file.bin", full)  # as if the write had failed
    assert (tmp_path / "file.bin.part").stat().st_size > 0, "kept for the next try"


def test_a_mirror_is_asked_instead_of_the_publisher(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOFED_MIRROR", server.url(""))
    fetch(Remote("http://127.0.0.1:1/deep/file.bin", remote(server).md5, 1.1), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    monkeypatch.setenv("ISOFED_MIRROR", "nowhere")
    with pytest.raises(UserError, match="'nowhere/x' is not an address"):
        fetch(Remote("http://127.0.0.1:1/x", "0" * 32, 1), tmp_path / "x")


# Data sets and the command


@pytest.fixture
def offers(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    server.files["set.tar.gz"] = tar_of(file("set-1/a.bin"), file("set-1/b.bin"))
    monkeypatch.setattr(
        download,
        "OFFERS",
        {
            "packed": Offer("set-1", (remote(server, "set.tar.gz"),), 1),
            "plain": Offer("plain", (remote(server), remote(server, "set.tar.gz"))),
        },
    )
    return server


def test_a_set_is_fetched_once(offers: Server, tmp_path: Path) -> None:
    for _ in range(2):
        assert get("packed", tmp_path) == tmp_path / "set-1"
        assert get("plain", tmp_path) == tmp_path / "plain"
    assert len(offers.asked) == 3
    visible = sorted(p.name for p in tmp_path.rglob("*") if not p.name.startswith("."))
    assert visible == ["a.bin", "b.bin", "file.bin", "plain", "set-1", "set.tar.gz"]
    assert {p.name for p in (tmp_path / "set-1").iterdir()} == {"a.bin", "b.bin"}


def test_an_archive_that_lies_there_is_only_unpacked(offers: Server, tmp_path: Path) -> None:
    (tmp_path / "set.tar.gz").write_bytes(offers.files["set.tar.gz"])
    (tmp_path / ".set-1.tmp").mkdir()  # a process was killed while it unpacked
    (tmp_path / ".set-1.tmp" / "half").touch()
    get("packed", tmp_path)
    assert offers.asked == [] and (tmp_path / "set-1" / "a.bin").exists()
    assert not (tmp_path / ".set-1.tmp").exists() and not (tmp_path / "set.tar.gz").exists()


def test_names_that_cannot_be_fetched_are_explained(tmp_path: Path) -> None:
    for name in download.BY_HAND:
        with pytest.raises(UserError, match=f"'{name}' must be fetched by hand: .*; then give that folder as root="):
            get(name, tmp_path)
    with pytest.raises(UserError, match="there is no data set to download 'cifar-100': did you mean 'cifar100'"):
        get("cifar-100", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="the folder .*file cannot be made"):
        get("mnist", tmp_path / "file")


def test_every_name_is_a_data_set_and_every_checksum_is_one() -> None:
    from isofed.data.sources import SOURCES

    assert set(download.OFFERS) | set(download.BY_HAND) <= set(SOURCES)
    for offer in download.OFFERS.values():
        for one in offer.files:
            assert len(bytes.fromhex(one.md5)) == 16 and one.url.startswith("http") and one.name


@pytest.mark.parametrize("terminal", [False, True])
def test_the_command_fetches_and_says_how_to_use_it(
    terminal: bool, offers: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, color_system=None)
    commands.data(console, ["get", "packed", f"root={tmp_path / 'here'}"])
    said = out.getvalue()
    assert f"packed is in {tmp_path / 'here' / 'set-1'}; use it with: data=packed root={tmp_path / 'here'}" in said
    assert ("downloading set.tar.gz (0.0 MB)" in said) != terminal and "set.tar.gz" in said
    monkeypatch.chdir(tmp_path)
    commands.data(console, ["get", "plain"])
    monkeypatch.setenv("ISOFED_DATA", str(tmp_path / "there"))
    commands.data(console, ["get", "plain"])
    assert (tmp_path / "data" / "plain" / "file.bin").exists() and (tmp_path / "there" / "plain" / "file.bin").exists()


def test_the_command_ends_with_one_sentence(server: Server, tmp_path: Path) -> None:
    said = complaint(isofed("data", "get", cwd=tmp_path), 2)
    assert "takes one name and root=FOLDER: it fetches cifar10, cifar100" in said
    assert "takes one name" in complaint(isofed("data", "get", "mnist", "stl10", cwd=tmp_path), 2)
    assert "takes one name" in complaint(isofed("data", "get", "mnist", "rounds=3", cwd=tmp_path), 2)
    assert "domaingeneralization.github.io" in complaint(isofed("data", "get", "pacs", cwd=tmp_path), 2)
    assert "did you mean 'mnist'" in complaint(isofed("data", "get", "mnst", cwd=tmp_path), 2)
    env = {"ISOFED_MIRROR": server.url("")}
    assert os.listdir(tmp_path) == []
    said = complaint(isofed("data", "get", "cifar100", cwd=tmp_path, env=env), 1)
    assert said.endswith("cifar-100-binary.tar.gz cannot be downloaded: the server answers 404 Not Found")
    server.files["cifar-100-binary.tar.gz"] = b"something else"
    said = complaint(isofed("data", "get", "cifar100", cwd=tmp_path, env=env), 1)
    assert "is not the file that was published" in said
    assert sorted(os.listdir(tmp_path / "data")) == [".cifar100.lock"]
