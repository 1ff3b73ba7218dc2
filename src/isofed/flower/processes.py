"""Flower's processes with the right words: a server, and a site. Each is a group that ends as a whole."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from isofed import extras
from isofed.errors import RunError, UserError
from isofed.flower.addresses import around_proxy, check_free, free_port, joined, near
from isofed.flower.keys import Keys, private_folder, write_secret
from isofed.flower.server_app import COMMAND, INSECURE

BIN = Path(sys.executable).parent  # Flower's commands are installed beside Python
REVIVE = 5.0  # seconds between two tries to start a group
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PARENT_DEATH = 1  # the kernel's PR_SET_PDEATHSIG
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for a GPU must not start CUDA in a process that will be copied
}


@dataclass
class Group:
    """Processes that belong together; their output goes into one file, or to the terminal."""

    home: Path  # where Flower keeps its own files
    log: Path | None = None
    folder: Path | None = None  # in which its processes work; this one's if not given
    variables: Mapping[str, str] = field(default_factory=dict)
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _again: float = 0.0  # when it may be started anew

    def start(self, *words: str | Path) -> subprocess.Popen[bytes]:
        """Start one more."""
        private_folder(self.home)
        environment = {**os.environ, **_QUIET, "FLWR_HOME": str(self.home), **self.variables}
        environment["PATH"] = f"{BIN}{os.pathsep}{environment.get('PATH', '')}"
        around_proxy(environment)
        parent = os.getpid()
        environment[COMMAND] = str(parent)
        where = self.log.open("ab") if self.log else None
        try:
            made = subprocess.Popen(
                [str(word) for word in words],
                env=environment,
                cwd=self.folder,
                preexec_fn=lambda: _end_with(parent),
                stdin=subprocess.DEVNULL,
                stdout=where,
                stderr=where,
                start_new_session=True,
            )
        finally:
            if where:
                where.close()
        self.running.append(made)
        return made

    def alive(self) -> bool:
        return bool(self.running) and all(process.poll() is None for process in self.running)

    def revive(self, start: Callable[[], None]) -> bool:
        """Start all anew where one has ended by itself; whether that was so.

        Flower's node gives up if it is not let in, and that is what happens to one that was killed and is back before
        the server has noticed: for a minute its key counts as connected.
        """
        if not self.running or self.alive() or time.monotonic() < self._again:
            return False
        self.kill()
        self._again = time.monotonic() + REVIVE
        start()
        return True

    def kill(self) -> None:
        """End all at once, with what they have started."""
        for process in self.running:
            _signal(process, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        self.running = []


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)  # the group outlives its first process, and may still have others


def stop(*groups: Group, patience: float = 5.0) -> None:
    """End all processes of some groups, kindly at first."""
    processes = [process for group in groups for process in group.running]
    for process in processes:
        _signal(process, signal.SIGTERM)
    end = time.monotonic() + patience
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    for group in groups:
        group.kill()


def _end_with(parent: int) -> None:
    """In a new process: be ended by the kernel when the parent ends, also if it is killed and can do nothing.

    Otherwise what it leaves behind would keep the port, and go on serving.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PARENT_DEATH, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended before this was said
            os._exit(1)


def start_server(group: Group, keys: Keys | None, host: str, port: int, database: Path) -> None:
    """Start Flower's server. Without keys it is unencrypted, and lets in everybody who can reach it."""
    check_free(host, port)
    private_folder(database.parent)
    words = ["--host", host, "--port", str(port), "--database", str(database)]
    words += ["--disable-runtime-dependency-installation"]
    if keys is None:
        group.variables = {**group.variables, INSECURE: "1"}
        group.start(BIN / "flower-superlink", "--insecure", *words)
        return
    keys.check_server()
    words += ["--ssl-ca-certfile", str(keys.ca), "--ssl-certfile", str(keys.certificate)]
    words += ["--ssl-keyfile", str(keys.private), "--enable-supernode-auth"]
    words += ["--isolation", "process", "--superexec-auth-secret-file", str(keys.secret)]
    link = group.start(sys.executable, "-P", "-m", "isofed.flower.link", keys.token, *words)
    executor = ["--runtime-api-address", joined(near(host), port), "--root-certificates", str(keys.ca)]
    executor += ["--superexec-auth-secret-file", str(keys.secret), "--parent-pid", str(link.pid)]
    group.start(BIN / "flower-superexec", *executor)


def start_site(
    group: Group, keys: Keys | None, server: str, name: str, node: Mapping[str, object], port: int | None = None
) -> None:
    """Start a site that connects to a server. ``node`` is what its app is told: number, name, folders, device."""
    port = port or free_port()
    private_folder(group.home)
    secret = group.home / "executor.secret"
    write_secret(secret, os.urandom(32))
    words = ["--superlink", server, "--port", str(port), "--node-config", _toml(node)]
    words += ["--isolation", "process", "--superexec-auth-secret-file", str(secret)]
    if keys is None:
        words += ["--insecure"]
    else:
        private = keys.site(name)
        for path in (keys.ca, private):
            if not path.is_file():
                raise UserError(f"there is no {path}; a site needs the server's ca.crt and a key of its own")
        words += ["--root-certificates", str(keys.ca), "--auth-supernode-private-key", str(private)]
    node_process = group.start(BIN / "flower-supernode", *words)
    group.start(sys.executable, "-P", "-m", "isofed.flower.runner", f"127.0.0.1:{port}", secret, str(node_process.pid))


def _toml(node: Mapping[str, object]) -> str:
    """A node's table as Flower's command line takes it."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in node.items())


def check_installed() -> None:
    """Say what to install, where Flower is missing."""
    if shutil.which("flower-superlink", path=str(BIN)) is None:
        raise UserError(f"isofed flower needs Flower: {extras.command('flower')}")


def wait_until(condition: Callable[[], bool], group: Group, seconds: float, what: str) -> None:
    """Wait for something that a group of processes should bring about."""
    end = time.monotonic() + seconds
    while not condition():
        if not group.alive():
            raise RunError(f"{what} ended by itself{_last(group)}")
        if time.monotonic() > end:
            raise RunError(f"{what} was not ready after {seconds:g} s{_last(group)}")
        time.sleep(0.1)


def _last(group: Group) -> str:
    if group.log is None or not group.log.exists():
        return ""
    lines = group.log.read_text(errors="replace").strip().splitlines()
    return f": {lines[-1].strip()[:300]}" if lines else ""
