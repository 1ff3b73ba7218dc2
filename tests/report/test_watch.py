"""The server beside a run: on loopback only, reading only, through the run's end, its restart and half a line."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from isofed import Federation
from isofed.errors import UserError
from isofed.progress import Watcher
from isofed.report.watch import HOST, Watch
from tests.report.made import line, make_run


def ask(
    watch: Watch, path: str = "/data", headers: Mapping[str, str] | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(HOST, watch.port, timeout=10)
    connection.request(method, path, headers=dict(headers or {}))
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def shown(watch: Watch) -> dict[str, Any]:
    status, _, body = ask(watch)
    assert status == 200
    return dict(json.loads(body))


def split_of(watch: Watch) -> list[dict[str, Any]]:
    """Waits for the splits: data sets are read beside the page."""
    end = time.monotonic() + 20
    while not (splits := shown(watch)["splits"]) and time.monotonic() < end:
        time.sleep(0.02)
    return list(splits)


def files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*")}


def test_it_listens_on_loopback_only(tmp_path: Path) -> None:
    with Watch([tmp_path], 0) as watch:
        assert watch._server.socket.getsockname() == (HOST, watch.port) and HOST == "127.0.0.1"
        others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
        for address in others - {HOST}:
            with pytest.raises(OSError):
                socket.create_connection((str(address), watch.port), timeout=1).close()


def test_another_site_cannot_read_it_through_a_name_of_its_own(tmp_path: Path) -> None:
    with Watch([tmp_path], 0) as watch:
        assert ask(watch, headers={"Host": f"evil.example:{watch.port}"})[0] == 403
        assert ask(watch, headers={"Host": f"localhost:{watch.port}"})[0] == 200
        assert ask(watch, "/../etc/passwd")[0] == 404
        assert ask(watch, "/", method="POST")[0] == 501
        _, headers, _ = ask(watch)
        assert "Access-Control-Allow-Origin" not in headers and headers["X-Content-Type-Options"] == "nosniff"


def test_the_page_is_the_report_with_a_connection_to_itself_only(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [0.5], finished=False)
    with Watch([tmp_path / "run"], 0) as watch:
        status, headers, body = ask(watch, "/")
        assert status == 200 and headers["Content-Type"].startswith("text/html")
        assert b"connect-src 'self'" in body and b'"live":true' in body
        assert ask(watch, "/", method="HEAD")[2] == b""


def test_what_has_not_changed_is_not_sent_again(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [0.5], finished=False)
    with Watch([tmp_path / "run"], 0) as watch:
        split_of(watch)  # joins the page when it is ready, which would be a change
        tag = ask(watch)[1]["ETag"]
        assert ask(watch, headers={"If-None-Match": tag})[0] == 304
        folder.append(line(2, 0.6))
        assert ask(watch, headers={"If-None-Match": tag})[0] == 200


def test_it_goes_with_a_run_through_half_a_line_its_end_and_its_restart(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Watch([run], 0) as watch:
        assert "no run" in shown(watch)["problems"][0]  # it may be there first
        make_run(run, [0.2, 0.3], finished=False, rounds=4)
        assert shown(watch)["runs"][0]["done"] == 2
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line(3, 0.5))[:30])
        assert shown(watch)["runs"][0]["done"] == 2
        assert not shown(watch)["runs"][0]["finished"] and shown(watch)["problems"] == []
        os.truncate(run / "metrics.jsonl", 0)  # taken up again from the start
        assert shown(watch)["runs"][0]["done"] == 0
        shutil.rmtree(run)
        assert shown(watch)["runs"] == []
        make_run(run, [0.2, 0.3, 0.4, 0.5], rounds=4)
        done = shown(watch)
        assert done["runs"][0]["finished"] and done["answer"]["headline"] == "50.0 % accuracy."
        assert [x["row"] for x in done["runs"]] == ["fedavg"]
        make_run(tmp_path / "more", [0.9])
        assert len(shown(watch)["runs"]) == 1


def test_a_run_that_starts_later_has_its_split_too(tmp_path: Path) -> None:
    with Watch([tmp_path / "run"], 0) as watch:
        assert shown(watch)["splits"] == []
        make_run(tmp_path / "run", [0.2], finished=False)
        (split,) = split_of(watch)
        assert sum(map(sum, split["counts"])) > 0


def test_a_record_that_makes_no_sense_does_not_end_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [0.5])
    with Watch([tmp_path / "run"], 0) as watch:
        result = folder.path / "result.json"
        whole = result.read_text()
        result.write_text(whole.replace('"accuracy": 0.5', '"accuracy": "high"'))
        assert ask(watch)[0] == 500
        result.write_text(whole + " ")
        assert shown(watch)["answer"]["headline"] == "50.0 % accuracy."


def test_several_runs_at_once(tmp_path: Path) -> None:
    for method in ("fedavg", "fedprox"):
        make_run(tmp_path / method, [0.5], method, finished=False)
    with Watch([tmp_path / "fedavg", tmp_path / "fedprox"], 0) as watch:
        assert [x["row"] for x in shown(watch)["runs"]] == ["fedavg", "fedprox"]


def test_it_writes_nothing_and_takes_no_lock(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [0.5], finished=False)
    before = files(tmp_path)
    with Watch([tmp_path / "run"], 0) as watch, folder.lock():
        assert split_of(watch) and shown(watch)["runs"]
    after = files(tmp_path)
    assert {name: after[name] for name in before if name != "run"} == {n: s for n, s in before.items() if n != "run"}
    assert set(after) - set(before) <= {"run/.lock"}


def test_a_run_that_is_watched_ends_with_the_same_bits(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "data": "synthetic:samples=200,test=50",
        "model": "mlp",
        "clients": 2,
        "partition": "iid",
        "rounds": 5,
        "executor": "serial",
    }
    alone = Federation(out=tmp_path / "alone", **settings).fit()
    seen: list[int] = []

    class Looking(Watcher):
        def round(self, line: dict[str, Any]) -> None:
            seen.append(shown(watch)["runs"][0]["done"])

    with Watch([tmp_path / "watched"], 0) as watch:
        watched = Federation(out=tmp_path / "watched", **settings).fit(Looking())
        assert shown(watch)["runs"][0]["finished"]
    assert seen == [1, 2, 3, 4, 5] and watched.accuracy == alone.accuracy
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("alone", "watched")]
    assert models[0] == models[1]


def test_ports(tmp_path: Path) -> None:
    with Watch([tmp_path]) as first, Watch([tmp_path]) as second:
        assert first.port != second.port
        with pytest.raises(UserError, match=f"port {second.port} cannot be used"):
            Watch([tmp_path], second.port)
    with pytest.raises(UserError, match="from 0 to 65535"):
        Watch([tmp_path], 70000)
