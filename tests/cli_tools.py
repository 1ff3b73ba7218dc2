"""Real ``isofed`` processes for the tests, cheaply: importing torch takes seconds, forking a process that has it not.

Run as a script, this file is that process. It imports what the commands need, computes nothing, and forks a child for
each command: an ordinary process in a session of its own, with its own folder, output files, limits and exit code, that
calls ``isofed.cli:main`` as the installed command does. What matters before ``main`` (starting up, importing) is tested
with ``python -m isofed.cli`` instead, see :func:`plain`.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

SMALL = ("data=synthetic:samples=200,test=50", "model=mlp", "partition=iid", "clients=2", "local_epochs=1")
TINY = (
    "data=synthetic:samples=40,test=20,classes=2,size=2",
    "model=mlp",
    "partition=iid",
    "clients=2",
    "local_epochs=1",
    "executor=serial",
)
MINE = '''
from dataclasses import dataclass

from isofed import Method


@dataclass(frozen=True)
class Mine(Method):
    """A method of one's own."""

    scale: float = 0.5

    def aggregate(self, round):
        round.update = self.scale * round.update
'''


@dataclass(frozen=True)
class Done:
    """How a command ended; a negative code is the signal that killed it."""

    code: int
    out: str
    err: str

    def __iter__(self) -> Iterator[Any]:
        return iter((self.code, self.out, self.err))


class Command:
    """One ``isofed`` command that runs."""

    def __init__(self, server: Server, pid: int, out: Path, err: Path) -> None:
        self._server, self.pid, self._out, self._err = server, pid, out, err

    def kill(self) -> Done:
        """SIGKILL, as by the kernel: nothing can be cleaned up."""
        self._server.ask({"signal": signal.SIGKILL, "pid": self.pid})
        return self.wait()

    def interrupt(self, by: signal.Signals = signal.SIGINT) -> None:
        """Ctrl-C: the terminal sends SIGINT to all processes of the command, as a scheduler does SIGTERM."""
        self._server.ask({"signal": by, "pid": self.pid})

    def wait(self, timeout: float = 60) -> Done:
        code = self._server.ask({"wait": self.pid, "timeout": timeout})["code"]
        if code is None:
            self.kill()
            raise TimeoutError(f"still running after {timeout} s: {self._out.read_text()}{self._err.read_text()}")
        return Done(code, self._out.read_text(), self._err.read_text())

    def output(self) -> str:
        """What it has printed so far."""
        return self._out.read_text()

    def over(self) -> bool:
        return bool(self._server.ask({"poll": self.pid})["over"])

    def when(self, happened: Callable[[], bool], timeout: float = 30) -> None:
        """Wait until something has happened, or the command is over."""
        end = time.monotonic() + timeout
        while not happened():
            assert time.monotonic() < end, f"did not happen: {self._out.read_text()}{self._err.read_text()}"
            if self.over():
                return
            time.sleep(0.005)


class Server:
    """The process that forks."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="isofed-tests-")
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            text=True,
        )

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(
        self, words: tuple[str, ...], cwd: Path | str | None, env: Mapping[str, str], limit: int | None, tty: str | None
    ) -> Command:
        self._count += 1
        out, err = (Path(self._folder.name) / f"{self._count}.{kind}" for kind in ("out", "err"))
        out.touch()
        err.touch()
        request = {"words": words, "cwd": str(cwd or self._folder.name), "env": dict(env), "limit": limit}
        pid = self.ask(request | {"out": tty or str(out), "err": tty or str(err)})["pid"]
        return Command(self, pid, out, err)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()


@cache
def _server() -> Server:
    server = Server()
    atexit.register(server.close)
    return server


def environment() -> dict[str, str]:
    """The environment of a command: this package, an ordinary terminal type, nothing that forces colours."""
    import isofed

    assert isofed.__file__ is not None
    source = str(Path(isofed.__file__).parents[1])
    odd = ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "CLICOLOR_FORCE")
    kept = {k: v for k, v in os.environ.items() if k not in odd}
    path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH")) if p)
    return kept | {"PYTHONPATH": path, "TERM": "xterm-256color", "PYTHONDONTWRITEBYTECODE": "1"}


def start(
    *words: Any,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    limit: int | None = None,
    tty: str | None = None,
) -> Command:
    """Start a command. ``limit`` is the largest file it may write, ``tty`` a terminal for all its streams."""
    return _server().start(tuple(map(str, words)), cwd, env or {}, limit, tty)


def isofed(*words: Any, timeout: float = 60, **how: Any) -> Done:
    """Run a command to its end."""
    return start(*words, **how).wait(timeout)


def plain(*words: Any, cwd: Path | str | None = None, **how: Any) -> Done:
    """Run ``python -m isofed.cli`` as anyone would."""
    command = [sys.executable, "-m", "isofed.cli", *map(str, words)]
    made = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120, **how)
    return Done(made.returncode, made.stdout, made.stderr)


def succeeds(*words: Any, **how: Any) -> str:
    """The output of a command that must end well and say nothing on the error stream."""
    code, out, err = isofed(*words, **how)
    assert (code, err) == (0, ""), out + err
    return str(out)


def complaint(done: Done, code: int) -> str:
    """The one line of a command that must have failed in this way, without its 'isofed: '."""
    assert done.code == code, (done.code, done.out, done.err)
    assert "Traceback" not in done.out + done.err
    lines = done.err.splitlines()
    assert len(lines) == 1, done.err
    assert lines[0].startswith("isofed: ")
    assert "internal error" not in lines[0]
    return lines[0].removeprefix("isofed: ")


def result(run: Path) -> dict[str, Any]:
    found = json.loads((run / "result.json").read_text())
    assert isinstance(found, dict)
    return found


def metrics(run: Path) -> list[dict[str, Any]]:
    """Every line, half-written ones included: these make it fail."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def config(run: Path) -> dict[str, Any]:
    found = yaml.safe_load((run / "config.yaml").read_text())
    assert isinstance(found, dict)
    return found


def model(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All files below a folder with the time of their last change and their content."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}


def same_record(run: Path, whole: Path) -> None:
    """A run that was interrupted must leave what an uninterrupted one leaves, but for times and notes."""
    clocks = {"seconds", "evaluate_seconds"}

    def timeless(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in line.items() if k not in clocks} for line in lines]

    assert model(run) == model(whole)
    assert [line["round"] for line in metrics(run)] == list(range(1, len(metrics(whole)) + 1))
    assert timeless(metrics(run)) == timeless(metrics(whole))
    own = {"seconds", "peak_memory", "executor", "notes"}
    one, other = ({k: v for k, v in result(r).items() if k not in own} for r in (run, whole))
    assert one == other
    assert not [p for p in run.rglob("*") if p.name.endswith(".tmp")]


def workers_of(pid: int) -> list[int]:
    """Worker processes of a command: they are told the folder of its shared memory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if "isofed.engine.worker" in line and f"isofed-{pid}-" in line:
                found.append(int(entry.name))
    return found


def shared_folders(pid: int) -> list[Path]:
    """Folders with shared memory that a command has made."""
    return [p for base in ("/dev/shm", tempfile.gettempdir()) for p in Path(base).glob(f"isofed-{pid}-*")]


def all_gone(pid: int, timeout: float = 30) -> None:
    """Workers and shared memory of a command that is over must go by themselves."""
    end = time.monotonic() + timeout
    while workers_of(pid) or shared_folders(pid):
        assert time.monotonic() < end, (workers_of(pid), shared_folders(pid))
        time.sleep(0.05)


def escapes(text: str) -> list[str]:
    """Control sequences and other signs that belong on a terminal only."""
    return re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]", text)


# --- the process that forks


def _child(request: dict[str, Any]) -> int:
    """Become the command."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    for number, (name, flags) in enumerate(
        [(os.devnull, os.O_RDONLY), (request["out"], os.O_WRONLY), (request["err"], os.O_WRONLY)]
    ):
        handle = os.open(name, flags | os.O_APPEND)
        os.dup2(handle, number)
        os.close(handle)
    for number, name in ((1, "stdout"), (2, "stderr")):
        buffering = 1 if os.isatty(number) else -1
        setattr(sys, name, os.fdopen(number, "w", buffering, encoding="utf-8", closefd=False))
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    if request["limit"] is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"], request["limit"]))
    sys.argv = ["isofed", *request["words"]]
    try:
        from isofed.cli import main  # here: it looks at its output when it is imported

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120  # as the interpreter does
    return code


def _serve() -> None:
    import isofed.commands
    import isofed.methods

    # What commands import only when they need it takes a second or two: here it is once for all of them.
    for name in isofed.methods.names():
        isofed.methods.find(name)
    for package in ("dp_accounting.rdp", "sklearn.datasets", "typer"):
        with contextlib.suppress(ImportError):
            importlib.import_module(package)

    codes: dict[int, int] = {}

    def over(pid: int) -> bool:
        if pid not in codes:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
        return pid in codes

    for line in sys.stdin:
        request = json.loads(line)
        if "words" in request:
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = _child(request)
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                finally:
                    os._exit(code)
            reply: dict[str, Any] = {"pid": pid}
        elif "poll" in request:
            reply = {"over": over(request["poll"])}
        elif "signal" in request:
            reply = {}
            if not over(request["pid"]):  # one that is over and reaped may have given its number away
                send = os.kill if request["signal"] == signal.SIGKILL else os.killpg
                send(request["pid"], request["signal"])
        else:
            end = time.monotonic() + request["timeout"]
            while not over(request["wait"]) and time.monotonic() < end:
                time.sleep(0.003)
            reply = {"code": codes.get(request["wait"])}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of the tests must not hide a module
    _serve()
