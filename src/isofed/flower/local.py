"""A whole federation on one machine, for trying out: server, sites, certificates and keys, and their end."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from isofed.errors import RunError
from isofed.flower import terms as deployment
from isofed.flower.addresses import free_port, joined, near
from isofed.flower.control import Control, Status
from isofed.flower.keys import Keys, make_server_keys, make_site_key, private_folder
from isofed.flower.processes import Group, check_installed, start_server, start_site, stop, wait_until
from isofed.flower.project import read_table
from isofed.records import CONFIG

READY = 60.0  # seconds for a server to start
_ERROR = re.compile(r"ERROR\b.*?isofed: (.+)")  # a line of a site's log; Flower writes its level in colour

Told = Callable[[dict[str, object]], None]


@dataclass
class Local:
    """The processes of a federation on this machine; a context that starts and ends them.

    Args:
        app: the project.
        work: a folder for logs, keys and what the sites remember.
        folders: each site's own data, where the run says data=sites.
        insecure: no encryption, no keys.
    """

    app: Path
    work: Path
    folders: Mapping[int, Path] = field(default_factory=dict)
    insecure: bool = False

    def __post_init__(self) -> None:
        check_installed()
        self.app, self.work = self.app.resolve(), self.work.resolve()
        self.sites = deployment.read(read_table(self.app))[0].clients or 1  # what is wrong is said before any start
        self.port, self.ports = free_port(), [free_port() for _ in range(self.sites)]
        self.keys: Keys | None = None
        private_folder(self.work)
        private_folder(self.work / "logs")
        self.server = self._group("server")
        self.server.folder = self.app
        self.groups = [self._group(self.name(number)) for number in range(self.sites)]
        self._before = [len(_text(group)) for group in self.groups]  # logs of an earlier start are written on
        self._said: set[str] = set()

    def _group(self, name: str) -> Group:
        return Group(self.work / "flower" / name, self.work / "logs" / f"{name}.log")

    @staticmethod
    def name(number: int) -> str:
        return f"site-{number}"

    def __enter__(self) -> Local:
        if not self.insecure:
            self.keys = make_server_keys(self.work / "keys")
            for number in range(self.sites):
                make_site_key(self.work / "keys", self.name(number))
        try:
            self.start_server()
            for number in range(self.sites):
                self.start_site(number)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def control(self) -> Control:
        """A connection to the server."""
        return Control(self.address, self.keys)

    def start_server(self) -> None:
        """Start the server, or start it again; the sites are let in."""
        open_server(self.server, self.keys, "127.0.0.1", self.port, self.work / "flower.db")

    def start_site(self, number: int) -> None:
        """Start a site, or start it again."""
        name = self.name(number)
        node: dict[str, object] = {"partition-id": number, "name": name, "state": str(self.work / "states" / name)}
        if number in self.folders:
            node["data"] = str(self.folders[number].resolve())
        start_site(self.groups[number], self.keys, self.address, name, node, self.ports[number])

    def revive(self) -> None:
        """Start those sites again that have ended by themselves."""
        for number, group in enumerate(self.groups):
            group.revive(functools.partial(self.start_site, number))

    def stop(self) -> None:
        stop(*self.groups, self.server)

    def run(
        self, told: Told = lambda line: None, said: Callable[[str], None] = lambda text: None, poll: float = 0.5
    ) -> Path:
        """Run the app to its end, and give its run folder; ``said`` gets what is wrong at a site."""
        out, seen = self.folder, self.recorded()
        with self.control() as control:
            run = control.start(self.app)
            while True:
                status = control.status(run)
                self.revive()
                complaints = self._complaints()
                for text in complaints:
                    said(text)
                seen = tell(out, seen, told)
                if complaints and not (out / CONFIG).exists() and not status.over:
                    # A run begins when all sites are there, and these will not be: what is wrong there stays wrong.
                    raise RunError(f"the run cannot begin: {'; '.join(complaints)}")
                if status.over and not status.well:
                    raise RunError(f"the run has failed: {reason(status)}")
                if status.over:
                    return out
                if not self.server.alive():
                    raise RunError("the server has ended")
                time.sleep(poll)

    def recorded(self) -> int:
        """How many rounds an earlier start has left in the run folder."""
        return tell(self.folder, 0, lambda line: None)

    def _complaints(self) -> list[str]:
        """What the sites have written about errors since the start, each sentence once.

        A site keeps it from the server, as it may name files; here both are the same person's.
        """
        found = [
            f"{self.name(number)}: {text.strip()}"
            for number, group in enumerate(self.groups)
            for text in _ERROR.findall(_text(group)[self._before[number] :])
        ]
        fresh = [text for text in dict.fromkeys(found) if text not in self._said]
        self._said.update(fresh)
        return fresh

    @property
    def folder(self) -> Path:
        """The run folder."""
        return run_folder(self.app)


def _text(group: Group) -> str:
    """What is in a log so far."""
    return group.log.read_text(errors="replace") if group.log and group.log.exists() else ""


def run_folder(app: Path) -> Path:
    """Where a project's run is recorded. Relative names in its settings start from the project, wherever it is used."""
    return app.absolute() / str(read_table(app).get("out") or deployment.Terms.out)


def reason(status: Status) -> str:
    """Why a run has failed, without Flower's words around it."""
    return status.details.removeprefix("ServerApp failed with exception: ")


def open_server(group: Group, keys: Keys | None, host: str, port: int, database: Path) -> list[str]:
    """Start a server, and let in the sites whose public keys are there; gives their names."""
    start_server(group, keys, host, port, database)
    public = keys.public() if keys else []
    with Control(joined(near(host), port), keys) as control:
        wait_until(control.reachable, group, READY, "the server")
        for key in public:
            control.register(key)
    return [key.stem for key in public]


def tell(out: Path, seen: int, told: Told) -> int:
    """Hand on the rounds that were recorded since."""
    try:
        lines = (out / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return seen
    for text in lines[seen:]:
        try:
            told(json.loads(text))
        except ValueError:
            return seen  # it is being written
        seen += 1
    return seen
