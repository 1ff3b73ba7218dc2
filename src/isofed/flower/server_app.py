"""The app of the server: gathers the sites, runs the federation, and leaves its run folder."""

from __future__ import annotations

import os
import threading
import time
from logging import getLogger
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from isofed.config import Settings
from isofed.errors import UserError
from isofed.files import locked
from isofed.flower import terms as deployment
from isofed.flower.crew import Crew
from isofed.flower.data import server_world
from isofed.flower.deployed import Deployed
from isofed.flower.terms import Terms
from isofed.progress import Watcher
from isofed.records import CONFIG
from isofed.result import Result

log = getLogger("flwr.isofed")  # below Flower's own, so that it appears where Flower writes
INSECURE = "ISOFED_FLOWER_INSECURE"  # set by the server's own start, where nodes have no keys
COMMAND = "ISOFED_FLOWER_COMMAND"  # likewise: the process of the command with which all is to end
PATIENCE = 20.0  # seconds that Flower has to end an app whose server is gone


def server() -> ServerApp:
    """A Flower server app that runs the federation of the app's table."""
    app = ServerApp()
    if command := os.environ.get(COMMAND):
        threading.Thread(target=_end_with, args=(int(command), PATIENCE), daemon=True).start()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings, terms = deployment.read(context.run_config)
        result = federate(grid, settings, terms)
        log.info("isofed: accuracy %.4f after %d rounds, recorded in %s", result.accuracy, result.rounds, terms.out)

    return app


def federate(grid: Grid, settings: Settings, terms: Terms) -> Result:
    """Run a federation over a grid, or go on with the one in its run folder."""
    out = Path(terms.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the run folder {out}: {error.strerror}") from error
    # Of two server apps only one may speak to the sites: after a restart Flower may take up the old one beside the new.
    with locked(out / ".server", f"the run {out}"):
        _possible(settings, terms)
        bound = os.environ.get(INSECURE) != "1"
        crew = Crew(grid, terms, settings.clients or 1, lambda text: log.warning("isofed: %s", text), bound)
        crew.gather()
        if (out / CONFIG).exists():
            # With more rounds it becomes what it would have been with all from the start, as any run does.
            run: Any = Deployed.resume(out, pool=crew, rounds=settings.rounds)  # type: ignore[arg-type]
            if other := deployment.changed(run.settings, settings):
                raise UserError(
                    f"{out} holds a run with another {other[0]}; choose another out=, or the settings of that run"
                )
        else:
            run = Deployed(out=out, pool=crew, **settings.to_dict())  # type: ignore[arg-type]
        result: Result = run.fit(_Told())
    return result


def _end_with(command: int, patience: float) -> None:
    """End this process if the command that started the server has ended, also if it was killed.

    Flower interrupts an app whose server is gone. Should that be in vain, because the interrupt comes while a thread
    holds what its end waits for, the app would stay for ever, and with it its lock on the run folder.
    """
    while _alive(command):
        time.sleep(1)
    time.sleep(patience)
    os._exit(1)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        pass
    return True


def _possible(settings: Settings, terms: Terms) -> None:
    """Say what cannot be run with this network and these pictures before any site is waited for."""
    world = server_world(settings, terms, [1] * (settings.clients or 1))
    settings.method.share(world.network())


class _Told(Watcher):
    """Writes into Flower's log how the run goes."""

    def round(self, line: dict[str, Any]) -> None:
        accuracy = line.get("accuracy")
        told = "" if accuracy is None else f", accuracy {accuracy:.4f}"
        what = f"skipped: {line['skipped']}" if line.get("skipped") else f"{line['clients']} sites{told}"
        log.info("isofed: round %d, %s", line["round"], what)
        for event in line["events"]:
            log.warning("isofed: round %d, client %d %s", line["round"], event["client"], event["event"])

    def note(self, text: str) -> None:
        log.warning("isofed: %s", text)
