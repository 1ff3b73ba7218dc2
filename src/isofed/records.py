"""The run folder: everything one run needs to be repeated, resumed, compared and shown.

::

    config.yaml                                     the resolved configuration
    environment.json                                versions, device and data the run was made with
    metrics.jsonl                                   one JSON line per round,
    diagnostics.jsonl                               and one per round that was diagnosed
    checkpoints/round-000012.safetensors            the last two states to go on from,
    checkpoints/clients.bin                         and what the clients remember in them
    kept/round-000010.safetensors                   models kept for later study,
    kept/round-000010-client-000003.safetensors     and those of single clients
    model.safetensors, result.json                  written at the end
    diagnosis.json                                  what ``isofed diagnose`` found out

A run can be killed at any moment: every file is replaced as a whole, but for three. A half-written last line of
``metrics.jsonl`` or ``diagnostics.jsonl`` is left out, and ``clients.bin`` is only written where no checkpoint needs
what is there.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from isofed.config import in_todays_words
from isofed.errors import RunError, UserError
from isofed.files import (
    DamagedFile,
    Tensors,
    load_tensors,
    locked,
    plain,
    remove_strays,
    save_tensors,
    write_atomic,
    write_error,
)
from isofed.functional import native
from isofed.lines import Lines
from isofed.yaml_text import BadYAML, read_yaml_text

__all__ = [
    "Checkpoint",
    "DamagedFile",
    "Kept",
    "RunFolder",
    "Tensors",
    "environment",
    "load_tensors",
    "save_tensors",
    "write_atomic",
]

CONFIG, ENVIRONMENT, METRICS = "config.yaml", "environment.json", "metrics.jsonl"
MODEL, RESULT, CHECKPOINTS, KEPT, LOCK = "model.safetensors", "result.json", "checkpoints", "kept", ".lock"
STATES = "clients.bin"
DIAGNOSTICS, DIAGNOSIS = "diagnostics.jsonl", "diagnosis.json"
COMPARISON, TUNING = "comparison", "tuning"  # tables of many runs, each as .json and .csv


def environment(device: str, fingerprint: str) -> dict[str, str]:
    """What a run's numbers depend on besides its configuration; ``fingerprint`` stands for the data."""
    from isofed import __version__  # here, because the package may import this module while it is being built

    return {
        "isofed": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "compiler": native.compiled_by() if device == "cpu" and native.allowed() else "none",
        "platform": platform.platform(),
        "device": device,
        "device_name": _device_name(device),
        "data": fingerprint,
    }


def _device_name(device: str) -> str:
    if device.startswith("cuda") and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    with suppress(OSError):  # Linux: platform.processor() says no more than the architecture there
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Checkpoint:
    """A state to go on from; ``note`` is a sentence to show when a newer one had to be skipped."""

    round: int
    tensors: Tensors
    info: dict[str, Any]
    note: str | None = None


@dataclass(frozen=True)
class Kept:
    """A model that was kept for later study: the shared one of a round, or a client's own."""

    round: int
    client: int | None
    path: Path


class RunFolder:
    """One run on disk. Make it with :meth:`create` or :meth:`open`; hold :meth:`lock` while writing."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._metrics, self._diagnostics = Lines(self.path / METRICS), Lines(self.path / DIAGNOSTICS)

    @classmethod
    def create(cls, path: Path | str, config: dict[str, Any], environment: dict[str, Any]) -> RunFolder:
        """Start a new run in a folder that does not hold one yet; missing folders are made."""
        folder = cls(path)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(f"cannot make the run folder {path}: there is a file in its place") from error
        except OSError as error:
            raise UserError(f"cannot make the run folder {path}: {error.strerror}") from error
        with folder.lock():  # so that of two processes only one makes the run
            if any((folder.path / name).exists() for name in (CONFIG, METRICS, CHECKPOINTS, MODEL, RESULT)):
                raise UserError(
                    f"{path} already holds a run: resume it with `isofed run --resume {path}` or choose another out="
                )
            if (several := several_in(folder.path)) is not None:
                raise UserError(f"{path} holds {several}, with which a single run would be mixed: choose another out=")
            try:
                folder._write_json(ENVIRONMENT, environment)
                # The configuration comes last: with it, the folder is a run.
                folder._write_config(config)
            except RunError as error:
                raise UserError(str(error)) from error
        return folder

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """An existing run, to read it or (inside :meth:`lock`) to go on with it."""
        folder = cls(path)
        if not folder.path.is_dir():
            what = "it is a file" if folder.path.exists() else "it does not exist"
            raise UserError(f"{path} is not a run folder: {what}")
        missing = [name for name in (CONFIG, ENVIRONMENT) if not (folder.path / name).is_file()]
        if missing and (several := several_in(folder.path)) is not None:
            raise UserError(
                f"{path} is not a run folder: it holds {several}, which goes on when its command is given again"
            )
        if missing:
            raise UserError(f"{path} is not a run folder: it has no {' and no '.join(missing)}")
        return folder

    @cached_property
    def config(self) -> dict[str, Any]:
        """The run's resolved configuration."""
        path = self.path / CONFIG
        try:
            config = read_yaml_text(path.read_bytes())
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        except BadYAML as error:
            raise UserError(f"{path} {error}") from error
        if not isinstance(config, dict):
            raise UserError(f"{path} does not hold a configuration")
        return in_todays_words(config)

    @cached_property
    def environment(self) -> dict[str, Any]:
        """What the run was made with, as :func:`environment` gave it."""
        return self._read_json(ENVIRONMENT)

    @property
    def states(self) -> Path:
        """The file with what the clients remember; see :mod:`isofed.store`."""
        return self.path / CHECKPOINTS / STATES

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only process that writes this run; a process that is killed lets go of it.

        Temporary files of a writer that was killed are removed on the way in.
        """
        with locked(self.path / LOCK, f"the run {self.path}"):
            for folder in (self.path, self.path / CHECKPOINTS, self.path / KEPT):
                remove_strays(folder)
            yield

    def append(self, line: dict[str, Any]) -> None:
        """Add one line to the metrics; a NaN or an infinity is written as null, which any JSON reader takes."""
        self._metrics.append(line)

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics, one dict a line; a half-written last line is left out."""
        return self._metrics.read()

    def diagnose(self, line: dict[str, Any]) -> None:
        """Add one line to the diagnostics of the rounds."""
        self._diagnostics.append(line)

    def diagnostics(self) -> list[dict[str, Any]]:
        """What was recorded of the rounds that were diagnosed, like :meth:`metrics`."""
        return self._diagnostics.read()

    def rewind(self, round: int) -> None:
        """Drop the lines of later rounds, and a half-written last one: before going on from ``round``."""
        self._metrics.rewind(round)
        self._diagnostics.rewind(round)

    def checkpoint(self, round: int, tensors: Tensors, info: dict[str, Any]) -> None:
        """Save a state to go on from. It and the one before it stay; older ones, and any of later rounds, go."""
        for lines in (self._metrics, self._diagnostics):
            lines.sync()  # those up to this round must not be lost in a power cut that the checkpoint survives
        self._save(f"{CHECKPOINTS}/{_name(round)}", tensors, info)
        rounds = self._rounds()
        # Later rounds are left from before a rewind, for instance damaged: they must not push out this one.
        stay = [other for other in rounds if other <= round][-2:]
        for other in rounds:
            if other not in stay:
                with suppress(OSError):
                    (self.path / CHECKPOINTS / _name(other)).unlink()

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that can be read, or None if there is none; RunError if all are damaged."""
        skipped: list[str] = []
        for round in reversed(self._rounds()):
            path = self.path / CHECKPOINTS / _name(round)
            try:
                tensors, info = load_tensors(path)
            except DamagedFile:
                skipped.append(path.name)
                continue
            except RunError:
                if path.exists():
                    raise
                return self.latest()  # the process that writes this run has just replaced it by a newer one
            note = None
            if skipped:
                damaged = f"{' and '.join(skipped)} {'is' if len(skipped) == 1 else 'are'} damaged"
                note = f"{damaged}, so the newest state that can be read is that of round {round}"
            return Checkpoint(round, tensors, info, note)
        if skipped:
            raise RunError(
                f"no checkpoint of {self.path} can be read ({', '.join(skipped)} damaged): "
                "start the run again with another out="
            )
        return None

    def keep(self, round: int, tensors: Tensors, info: dict[str, Any], client: int | None = None) -> None:
        """Save a model of this round for later study: the shared one, or a client's own."""
        self._save(f"{KEPT}/{_name(round, client)}", tensors, info)

    def kept(self) -> list[Kept]:
        """The models that were kept, by round and client; those left from before a rewind are among them."""
        found = [(re.fullmatch(_NAME, path.name), path) for path in (self.path / KEPT).glob("round-*.safetensors")]
        models = [
            Kept(int(match[1]), None if match[2] is None else int(match[2]), path) for match, path in found if match
        ]
        return sorted(models, key=lambda one: (one.round, -1 if one.client is None else one.client))

    def diagnosis(self) -> dict[str, Any]:
        """What ``isofed diagnose`` has found out so far; nothing before its first time."""
        return self._read_json(DIAGNOSIS) if (self.path / DIAGNOSIS).exists() else {}

    def forget_diagnosis(self) -> None:
        """What was found out about a model is of the past when rounds follow it."""
        (self.path / DIAGNOSIS).unlink(missing_ok=True)

    def write_diagnosis(self, content: dict[str, Any]) -> None:
        """Replace what ``isofed diagnose`` has found out."""
        self._write_json(DIAGNOSIS, content)

    def remove_if_unused(self) -> None:
        """Remove the folder of a run that failed before its first round was recorded: nothing could go on from it."""
        if not self._rounds() and not any((self.path / name).exists() for name in (METRICS, DIAGNOSTICS, KEPT, RESULT)):
            shutil.rmtree(self.path, ignore_errors=True)

    def finish(self, tensors: Tensors, info: dict[str, Any], result: dict[str, Any]) -> None:
        """Save the final model, then the result: a run with a result is finished and has its model."""
        self._save(MODEL, tensors, info)
        self._write_json(RESULT, result)

    def change_rounds(self, rounds: int) -> None:
        """Let the run have another number of rounds: what was found out about its last one is of the past."""
        for name in (RESULT, DIAGNOSIS):  # without which it goes on, if this is as far as it comes
            (self.path / name).unlink(missing_ok=True)
        config = self.config | {"rounds": rounds}
        self._write_config(config)
        self.__dict__["config"] = config  # which was read before

    def _write_config(self, config: dict[str, Any]) -> None:
        text = yaml.dump(config, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
        write_atomic(self.path / CONFIG, text.encode())

    def model(self) -> Tensors:
        """The final model's tensors, without those that stayed with clients."""
        tensors, _ = load_tensors(self.path / MODEL)
        return {k: v for k, v in tensors.items() if not k.startswith("client/")}

    def result(self) -> dict[str, Any] | None:
        """The result of a finished run, or None."""
        return self._read_json(RESULT) if (self.path / RESULT).exists() else None

    def _rounds(self) -> list[int]:
        """The rounds that have a checkpoint, rising."""
        names = [path.name for path in (self.path / CHECKPOINTS).glob("round-*.safetensors")]
        found = [re.fullmatch(r"round-(\d{6,})\.safetensors", name) for name in names]
        return sorted(int(match.group(1)) for match in found if match)

    def _save(self, name: str, tensors: Tensors, info: dict[str, Any]) -> None:
        path = self.path / name
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise write_error(path, error) from error
        save_tensors(path, tensors, info)

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        write_atomic(self.path / name, (json.dumps(plain(content), indent=2, allow_nan=False) + "\n").encode())

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise DamagedFile(f"{path} is damaged") from error
        if not isinstance(content, dict):
            raise DamagedFile(f"{path} is damaged")
        return content


def several_in(path: Path) -> str | None:
    """What a folder of many runs holds, in words; None of any other folder."""
    for name, what in ((COMPARISON, "a comparison"), (TUNING, "a tuning")):
        if (path / f"{name}.json").exists():
            return what
    return "runs of a comparison or a tuning" if any(path.glob(f"*/seed-*/{CONFIG}")) else None


_NAME = r"round-(\d{6,})(?:-client-(\d{6,}))?\.safetensors"


def _name(round: int, client: int | None = None) -> str:
    return f"round-{round:06d}.safetensors" if client is None else f"round-{round:06d}-client-{client:06d}.safetensors"


class _Dumper(yaml.SafeDumper):
    """Writes a value that occurs twice out twice: anchors and aliases would puzzle a reader."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
