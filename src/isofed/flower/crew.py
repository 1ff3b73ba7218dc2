"""The sites as the server sees them: who is connected under which number, and how they are asked.

Flower's node ids are random. Each node is asked once for its number, and the run's own generator samples numbers, so
that a deployment with one seed is reproducible. A number belongs to the node that first gave it: a registered site
cannot speak for another one, also after the server was restarted.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from isofed import __version__
from isofed.errors import RunError
from isofed.files import write_atomic
from isofed.flower import wire
from isofed.flower.limits import limit, objects
from isofed.flower.terms import Terms
from isofed.flower.wire import BadMessage

POLL = 0.25  # seconds between looks for answers
SETTLE = 30.0  # seconds that a node which is silent is left alone, and after which a person is told who is waited for
FILE = "sites.json"


@dataclass(frozen=True)
class Member:
    """A site that has introduced itself."""

    node: int
    name: str
    samples: int


class Crew:
    """The sites of one run. What is known of them is kept in the run folder."""

    def __init__(self, grid: Grid, terms: Terms, clients: int, note: Callable[[str], None], bound: bool) -> None:
        self.grid, self.terms, self.clients, self.note = grid, terms, clients, note
        self._bound = bound  # whether a node's id is that of its key, and lasts
        self._path = Path(terms.out) / FILE
        self._late: dict[str, tuple[int, int]] = {}  # messages whose time was over: site and round
        self._left_alone: dict[int, float] = {}  # nodes that gave no proper answer, until when they are not asked again
        self._told: set[str] = set()  # what was said about them
        self.members: dict[int, Member] = {}
        self.run = secrets.token_hex(16)
        if self._path.exists():
            try:
                known = json.loads(self._path.read_bytes())
                self.run = str(known["run"])
                self.members = {int(number): Member(**member) for number, member in known["sites"].items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise RunError(f"{self._path}, with who takes part in the run, is damaged; put it back") from error
        self._seen: set[int] = set()  # members that have introduced themselves to this process
        self.most_objects = objects({})  # of an answer; an introduction has no arrays
        limit(grid, lambda: self.most_objects, lambda text: self.note(text))

    @property
    def samples(self) -> list[int]:
        """Of each site; all must have introduced themselves once."""
        return [self.members[number].samples for number in range(self.clients)]

    def gather(self) -> None:
        """Wait for all sites: their sizes are part of the run, and one that is still connecting has not failed.

        A run that goes on knows the sizes, and does after a while without those that are missing.
        """
        patience, began, told = self.terms.patience, time.monotonic(), False
        while len(here := self.connected()) < self.clients:
            waited = time.monotonic() - began
            if waited > patience and len(self.members) == self.clients and self._enough(here):
                self.note(f"goes on without site {self._missing(here)}, not connected after {patience:g} s")
                return
            if waited > patience:
                said = "".join(f"; {text}" for text in sorted(self._told)[:5])
                raise RunError(
                    f"after {patience:g} s only {len(here)} of {self.clients} sites are connected, "
                    f"without site {self._missing(here)}{said}; start them, and then the run again"
                )
            if waited > SETTLE and not told:
                told = True
                self.note(f"waits for site {self._missing(here)}, up to {patience:g} s (patience= of the run)")
            time.sleep(POLL)

    def _missing(self, here: Mapping[int, int]) -> str:
        missing = [str(number) for number in range(self.clients) if number not in here]
        return ", ".join(missing[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")

    def wait_for_enough(self) -> None:
        """Before a round: wait while fewer sites are connected than a round needs."""
        end = time.monotonic() + self.terms.patience
        while not self._enough(self.connected()) and time.monotonic() < end:
            time.sleep(POLL)

    def _enough(self, here: Mapping[int, int]) -> bool:
        return len(here) >= self.terms.min_clients

    def connected(self) -> dict[int, int]:
        """The node of each site that is there now, by its number. New nodes are asked who they are."""
        nodes = set(self.grid.get_node_ids())
        known = {m.node for number, m in self.members.items() if number in self._seen}
        left_alone = {node for node, until in self._left_alone.items() if time.monotonic() < until}
        if new := sorted(nodes - known - left_alone):
            self._introduce(new)
        return {number: m.node for number, m in self.members.items() if m.node in nodes and number in self._seen}

    def _introduce(self, nodes: list[int]) -> None:
        messages = {node: Message(wire.content({"do": "hello"}), node, "query", ttl=self._ttl) for node in nodes}
        for node, reply in self._exchange(messages, self.terms.deadline):
            try:
                if isinstance(reply, str):
                    raise BadMessage(reply)
                self._admit(node, reply)
            except BadMessage as error:
                self._left_alone[node] = time.monotonic() + SETTLE  # or it would hold up every round
                text = f"a node that is connected {error}; it takes no part"
                if text not in self._told:
                    self._told.add(text)
                    self.note(text)

    def _admit(self, node: int, reply: RecordDict) -> None:
        facts = wire.facts(reply)
        if problem := wire.text(facts, "problem"):
            raise BadMessage(problem)
        number, name = wire.whole(facts, "number"), wire.text(facts, "name")[:64]
        if number >= self.clients:
            raise BadMessage(f"says it is site {number}, and there are {self.clients}, counted from 0")
        if wire.text(facts, "version") != __version__:
            raise BadMessage(f"('{name}') runs isofed {wire.text(facts, 'version')[:20]}, and the server {__version__}")
        new, old = Member(node, name, wire.whole(facts, "samples")), self.members.get(number)
        if old is not None and self._bound and old.node != node:
            raise BadMessage(f"('{name}') says it is site {number}, and has another key than '{old.name}' had as such")
        if old is not None and not self._bound and number in self._seen and old.node in set(self.grid.get_node_ids()):
            raise BadMessage(f"('{name}') says it is site {number}, and so does '{old.name}', which is still connected")
        if old is not None and old.samples != new.samples:
            raise BadMessage(f"('{name}') has {new.samples} samples, and had {old.samples} when the run was started")
        self.members[number] = new
        self._seen.add(number)
        self._save()

    def _save(self) -> None:
        sites = {str(number): asdict(member) for number, member in sorted(self.members.items())}
        write_atomic(self._path, (json.dumps({"run": self.run, "sites": sites}, indent=2) + "\n").encode())

    def called(self, number: int) -> str:
        """A site's name, for a person."""
        return f"'{self.members[number].name}'" if number in self.members else f"{number}"

    @property
    def _ttl(self) -> float:
        return 2 * self.terms.deadline  # an answer that is a little late is still taken in, and recorded as such

    def ask(self, kind: str, contents: Mapping[int, RecordDict], round: int) -> Iterator[tuple[int, RecordDict | str]]:
        """Ask sites, and give each one's answer, or in a few words why there is none."""
        here = self.connected()
        messages = {}
        for number, content in contents.items():
            if number in here:
                messages[here[number]] = Message(content, here[number], kind, ttl=self._ttl, group_id=str(round))
            else:
                yield number, "is not connected"
        numbers = {node: number for number, node in here.items()}
        for node, reply in self._exchange(messages, self.terms.deadline, {n: (numbers[n], round) for n in messages}):
            yield numbers[node], reply

    def late(self) -> Iterator[tuple[int, int]]:
        """Answers that have come after their deadline: site and round. They are thrown away."""
        for name in list(self._late):
            answer = self._pull(name)
            if answer is not None:
                found = self._late.pop(name)
                if not isinstance(answer, str):
                    yield found

    def _pull(self, name: str) -> RecordDict | str | None:
        """The answer to a message, if it is there; in a few words why it is none, if it cannot be read.

        One by one, so that what a site has spoilt is its own answer and no other.
        """
        try:
            found = list(self.grid.pull_messages([name]))
        except httpx.TransportError:
            raise  # that is the server's own trouble
        except Exception as error:
            return f"sent a message that cannot be read ({type(error).__name__})"
        if not found:
            return None
        return found[0].content if found[0].has_content() else f"failed: {_reason(found[0])}"

    def _exchange(
        self, messages: Mapping[int, Message], deadline: float, of: Mapping[int, tuple[int, int]] | None = None
    ) -> Iterator[tuple[int, RecordDict | str]]:
        """Send messages by node, and give the answers as they come; after the deadline, who has not answered."""
        waiting = dict(zip(self.grid.push_messages(list(messages.values())), messages, strict=True)) if messages else {}
        end = time.monotonic() + deadline
        while waiting and time.monotonic() < end:
            for name in list(waiting):
                answer = self._pull(name)
                if answer is not None:
                    yield waiting.pop(name), answer
            if waiting:
                time.sleep(POLL)
        for sent, node in waiting.items():
            if of is not None:
                self._late[sent] = of[node]
            yield node, f"did not answer within {deadline:g} s"


def _reason(reply: Message) -> str:
    text = " ".join(str(reply.error.reason or "no reason given").split())
    return "".join(sign for sign in text if sign.isprintable())[:200]
