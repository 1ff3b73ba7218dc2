"""Sites in this process: Flower's grid as an object whose nodes answer at once, with faults where a test wants some.

Messages, records and apps are Flower's and isofed's own; only the transport between them is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from isofed.flower.client_app import answer
from isofed.flower.data import Adapter, read_folder

Fault = Callable[[int, Message, RecordDict], RecordDict | Error | None]  # node, question, answer; None: no answer


class Loop(Grid):
    """A grid with one node for each folder that states are kept in."""

    def __init__(
        self,
        table: Mapping[str, Any],
        states: Path,
        sites: int,
        fault: Fault | None = None,
        adapter: Adapter = read_folder,
        nodes: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        self.table, self.fault, self.adapter = dict(table), fault, adapter
        self.nodes: dict[int, dict[str, Any]] = {
            100 + n: {"partition-id": n, "name": f"clinic-{n}", "state": str(states / str(n))}
            | dict((nodes or {}).get(n, {}))
            for n in range(sites)
        }
        self.contexts = {
            node: Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config=dict(table))
            for node, config in self.nodes.items()
        }
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1  # as a Flower process would have it
        self.sent: list[Message] = []  # every question that was put
        self._answers: dict[str, Message] = {}
        self._number = itertools.count()

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._put(message) for message in messages]

    def _put(self, message: Message) -> str:
        name = str(next(self._number))
        message.metadata.__dict__["_message_id"] = name
        self.sent.append(message)
        node = message.metadata.dst_node_id
        message.metadata.__dict__["_run_id"] = 1
        found: Any = answer(message, self.contexts[node], self.adapter)
        if self.fault is not None:
            found = self.fault(node, message, found)
        if found is not None:
            self._answers[name] = Message(found, reply_to=message)
        return name

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._answers.pop(name) for name in list(message_ids) if name in self._answers]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


def asked(message: Message) -> dict[str, Any]:
    """The plain part of a question."""
    facts = message.content["facts"]
    assert isinstance(facts, ConfigRecord)
    return dict(facts)
