"""The round of a simulation with sites as its clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor

from isofed.collect import Collected
from isofed.config import Settings
from isofed.data import Dataset
from isofed.engine.serial import Executor
from isofed.engine.world import World
from isofed.federation import Federation, State
from isofed.flower.crew import Crew
from isofed.flower.data import server_world
from isofed.flower.executor import Sites
from isofed.progress import Watcher
from isofed.store import Remembered


class Deployed(Federation):
    """A federation whose clients are the sites of a crew, given as ``pool``."""

    at_sites = True

    def _prepare(self, settings: Settings, dataset: Dataset | None, pool: Any) -> None:
        self.crew = cast(Crew, pool)
        super()._prepare(settings, dataset, None)

    def _make_world(self, settings: Settings, dataset: Dataset | None) -> World:
        return server_world(settings, self.crew.terms, self.crew.samples)

    @contextmanager
    def _make_executor(self, watch: Watcher) -> Iterator[Executor]:
        self.crew.note = lambda text: self._note(text, watch)
        yield Sites(self.world, self.device, self.crew)

    def _one_round(self, executor: Executor, *rest: Any) -> None:
        self.crew.wait_for_enough()
        super()._one_round(executor, *rest)

    def _too_few(self, number: int, collected: Collected, events: list[dict[str, Any]]) -> str | None:
        """A round with too few good updates changes nothing, and the next one is tried."""
        least = self.crew.terms.min_clients
        if collected.clients >= least:
            return None
        return f"{collected.clients} good updates where min_clients={least}"

    def _aggregate(self, number: int, collected: Collected, remembered: Remembered) -> State:
        self._used = sorted(remembered.taken)
        return super()._aggregate(number, collected, remembered)

    def _record(self, line: dict[str, Any], state: State, models: dict[int, Tensor]) -> None:
        """Also say whose updates are in the round."""
        line["sites"] = [] if line.get("skipped") else self._used
        super()._record(line, state, models)

    def _checkpoint(self, force: bool = False) -> None:
        # After every round: sites count on being told which of their last two states holds.
        super()._checkpoint(force=True)
