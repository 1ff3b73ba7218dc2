"""What a site remembers between its visits, on its own disk: in one folder for each run, one file for each round.

A site does not know whether the server has used an update. So the state that goes with it is *pending*: it is written
beside the one before, and which of them counts is said by the server's next message, in ``accepted``. That also holds
when the server was killed and has gone back to its last complete round. A file is written whole or not at all, has a
checksum, and is never unpickled.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from isofed.errors import RunError
from isofed.files import Tensors, load_tensors, remove_strays, save_tensors, write_error
from isofed.flower.terms import Refusal

NOTHING = 0  # in place of a round: no update of this site was ever accepted


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class SiteStates:
    """The states of one site in one run."""

    def __init__(self, folder: Path, run: str) -> None:
        if not re.fullmatch(r"[0-9a-f]{16,64}", run):  # it becomes the name of a folder
            raise Refusal("was sent a run without a proper name")
        self.folder = folder / run

    @contextmanager
    def locked(self, patience: float) -> Iterator[None]:
        """Wait until no other visit of this run is under way: a late message may meet the next one.

        But not for ever. At a site that is always slower than the deadline the visits that wait would grow in number,
        each with the site's data in memory.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.chmod(0o700)  # what it remembers is for nobody else
            handle = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise write_error(self.folder, error) from error
        try:
            end = time.monotonic() + patience
            while not _taken(handle):
                if time.monotonic() > end:
                    raise Refusal(f"was busy with an earlier request for {patience:g} s; see deadline= of the run")
                time.sleep(0.05)
            remove_strays(self.folder)
            yield
        finally:
            os.close(handle)

    def get(self, accepted: int) -> Tensors | None:
        """What is remembered since the visit in round ``accepted``."""
        if accepted == NOTHING:
            return None
        try:
            return load_tensors(self._file(accepted))[0]
        except RunError as error:
            raise Refusal(f"has lost what it remembered after round {accepted}: put its state folder back") from error

    def put(self, round: int, accepted: int, state: Tensors) -> None:
        """Keep the state of a visit until the server says what became of it, and forget what can no longer be asked.

        The server keeps its last two checkpoints, so the accepted state and the one before stay.
        """
        save_tensors(self._file(round), state, {"round": round})
        known = self.rounds()
        before = [r for r in known if r < accepted][-1:]
        for other in known:
            if other not in (*before, accepted) and other < round:
                with suppress(OSError):
                    self._file(other).unlink()

    def rounds(self) -> list[int]:
        """The rounds whose states are there, rising."""
        found = (re.fullmatch(r"round-(\d+)\.safetensors", path.name) for path in self.folder.glob("round-*"))
        return sorted(int(match[1]) for match in found if match)

    def _file(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.safetensors"
