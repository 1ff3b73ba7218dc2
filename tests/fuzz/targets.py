"""The parsers that read what comes from outside, each with valid inputs to start from.

A target makes an input of a random generator, and takes one. Taking it must end well or with one of the errors that are
shown as one sentence; whatever else happens is a bug.
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from PIL import Image

from isofed.config import read_words, read_yaml, settings
from isofed.data import load
from isofed.federation import Federation
from isofed.files import load_tensors, save_tensors
from isofed.methods import names, parse
from isofed.progress import Watcher
from isofed.records import CHECKPOINTS, RunFolder
from isofed.report.gather import read_run
from isofed.result import Result
from tests.fuzz.inputs import TOKENS, anything, broken

METHODS = (
    *("fedavg", "fedprox:mu=0.1+fedbn", "fednova+spherefed", "fedalign:mu=0.45,width=0.25", "fedavgm:0.5,true"),
    *("clip_update:norm=2,at=client+gaussian:noise=1e-2,at=client", "krum:f=2,keep=3", "trimmed:.2+moon:temperature=1"),
    *("scaffold:option=1", "fedadam:lr=1e-3,v0=none", "gradaug:sizes=none", "feduv:form=paper,detach=true"),
)
CONFIG = """\
method:
- fedprox: {mu: 0.01}
- fedavgm: {momentum: 0.5, damped: true}
data: synthetic:samples=60,test=20,classes=3
partition: dirichlet:0.5
clients: 3
participation: 1.0
rounds: 2
local_epochs: 1
lr: 0.05
lr_schedule: step:every=2,factor=0.5
augment: crop:1+flip
model: mlp
norm: null
keep: every:1
diagnose: none
seed: 3
train_loss: false
"""


class Target(NamedTuple):
    """A parser under test."""

    make: Callable[[random.Random], bytes]
    take: Callable[[bytes], None]


def every(folder: Path) -> dict[str, Target]:
    """All targets; each has a folder of its own for the files that it needs."""
    made = {"method": method(), "configuration": configuration(folder / "configuration")}
    made |= {"run folder": run_folder(folder / "run"), "checkpoint": checkpoint(folder / "checkpoint")}
    made["table"] = table(folder / "table")
    if importlib.util.find_spec("flwr"):  # an optional extra
        from tests.flower.messages import message

        made["message"] = Target(*message(folder / "message"))
    return made


def method() -> Target:
    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.3:  # words of the grammar in any order
            words = [*(n.encode() for n in names()), *TOKENS, b"mu", b"lr", b"norm", b"at", b"client"]
            return b"".join(rng.choice(words) for _ in range(rng.randint(1, 8)))
        return broken(rng, rng.choice(METHODS).encode())

    def take(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        if ".py:" not in text or "/" not in text:  # a file that the text names would be run, as it should be
            made = parse(text)
            assert parse(str(made)).parts == made.parts
            assert parse(made.to_yaml()).parts == made.parts

    return Target(make, take)


def configuration(folder: Path) -> Target:
    folder.mkdir(parents=True)
    file = folder / "mine.yaml"

    def make(rng: random.Random) -> bytes:
        chance = rng.random()
        if chance < 0.05:
            return anything(rng)
        if chance < 0.35:  # as words of the command line, told apart by their first byte
            words = [f"{k}={v}" for k, v in yaml.safe_load(CONFIG).items() if k != "method"]
            return b"w" + broken(rng, "\n".join(rng.sample(words, rng.randint(1, 5))).encode())
        return b"y" + broken(rng, CONFIG.encode())

    def take(data: bytes) -> None:
        if data[:1] == b"w":
            settings(read_words([w for w in data[1:].decode("utf-8", "replace").splitlines() if "\0" not in w]))
        else:
            file.write_bytes(data[1:])
            settings(read_yaml(file))

    return Target(make, take)


def table(folder: Path) -> Target:
    folder.mkdir(parents=True)
    lines = ["picture,label,site,patient,part,age"]
    for n in range(12):
        Image.new("L", (2, 2), n).save(folder / f"{n}.png")
        lines.append(
            f"{n}.png,{'ab'[n % 2]},{'north' if n < 6 else 'south'},p{n // 3},{'train' if n % 4 else 'test'},60"
        )
    valid = "\n".join(lines)

    def make(rng: random.Random) -> bytes:
        whole = valid.replace(",part", ",of") if rng.random() < 0.5 else valid  # without parts, some are set aside
        return anything(rng) if rng.random() < 0.03 else broken(rng, whole.replace(",", rng.choice(",,;\t")).encode())

    def take(data: bytes) -> None:
        (folder / "mine.csv").write_bytes(data)
        load(folder / "mine.csv")

    return Target(make, take)


def _small_run(folder: Path) -> Federation:
    """A run of two rounds with everything that a folder can hold."""
    values = yaml.safe_load(CONFIG) | {"method": "scaffold", "diagnose": "every:1", "keep_clients": "last"}
    run = Federation(out=folder, executor="serial", **values)
    run.fit()
    return run


def run_folder(folder: Path) -> Target:
    _small_run(folder / "whole")
    valid = {str(p.relative_to(folder / "whole")): p.read_bytes() for p in (folder / "whole").rglob("*") if p.is_file()}
    spoilt = [name for name in valid if name != ".lock"]
    readable = [name for name in spoilt if not name.endswith((".safetensors", ".bin"))]
    work = folder / "work"
    shutil.copytree(folder / "whole", work)

    def make(rng: random.Random) -> bytes:
        name = rng.choice(readable if rng.random() < 0.9 else spoilt)
        content = anything(rng) if rng.random() < 0.03 else broken(rng, valid[name])
        if name.endswith(".json") and rng.random() < 0.3:  # still JSON, of another shape
            content = json.dumps(_reshaped(rng, json.loads(valid[name]))).encode()
        how = rng.choices([b"resume", b"report", b"read"], [0.01, 0.1, 0.89])[0]
        return name.encode() + b"\n" + how + b"\n" + content

    def take(data: bytes) -> None:
        name, how, content = data.split(b"\n", 2)
        file = work / name.decode()
        try:
            file.write_bytes(content)
            if how == b"resume":
                resume()
            elif how == b"report":
                read_run(work)
            else:
                read(file.name)
        finally:
            for path in (file, work / ".lock"):
                path.write_bytes(valid.get(str(path.relative_to(work)), b""))

    def read(name: str) -> None:
        run = RunFolder.open(work)
        if name == "config.yaml":  # which takes long
            settings(run.config)
        for part in (run.environment, run.diagnostics(), run.diagnosis(), run.kept(), run.latest()):
            assert part is not None
        done = run.result()
        if done is not None:
            Result.from_dict(done, run.metrics(), work, run.model())

    def resume() -> None:
        result = work / "result.json"
        kept = result.read_bytes()
        result.unlink()
        try:
            Federation.resume(work)._take_up(Watcher())
        finally:
            result.write_bytes(kept)
            for name, content in valid.items():  # a resumed run may have cut its lines
                (work / name).write_bytes(content)

    return Target(make, take)


def _reshaped(rng: random.Random, value: Any) -> Any:
    """The same JSON with a part replaced, left out or added."""
    other = rng.choice([None, True, -1, 1e300, "x", [], {}, [1], {"a": 1}, float("nan"), 10**30, "9" * 5000])
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        if rng.random() < 0.2:
            return {k: v for k, v in value.items() if k != key} | ({"new": other} if rng.random() < 0.5 else {})
        return value | {key: _reshaped(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], _reshaped(rng, value[at]), *value[at + 1 :]]
    return other


def checkpoint(folder: Path) -> Target:
    run = _small_run(folder / "whole")
    run.folder = RunFolder.open(folder / "whole")
    (folder / "whole" / "result.json").unlink()
    file = sorted((folder / "whole" / CHECKPOINTS).glob("round-*.safetensors"))[-1]
    for other in (folder / "whole" / CHECKPOINTS).glob("round-*.safetensors"):
        if other != file:
            other.unlink()
    valid, (tensors, info) = file.read_bytes(), load_tensors(file)
    states, before = (folder / "whole" / CHECKPOINTS / "clients.bin").read_bytes(), run.state

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.4:  # whole, with the right checksum, and with tensors that do not belong there
            save_tensors(folder / "made", _altered(rng, tensors), info | ({"round": 7} if rng.random() < 0.1 else {}))
            return (folder / "made").read_bytes()
        if rng.random() < 0.5:  # the header: eight bytes of length, and JSON
            size = int.from_bytes(valid[:8], "little")
            head = broken(rng, valid[8 : 8 + size])
            length = len(head) if rng.random() < 0.8 else rng.choice([0, 2**31, 2**63, 2**64 - 1, rng.randrange(2**20)])
            return length.to_bytes(8, "little") + head + valid[8 + size :]
        return anything(rng) if rng.random() < 0.05 else broken(rng, valid, rare=())

    def take(data: bytes) -> None:
        file.write_bytes(data)
        run.state = before
        try:
            run._take_up(Watcher())
            for client in range(3):
                run.state.clients.get(client)
        finally:
            (folder / "whole" / CHECKPOINTS / "clients.bin").write_bytes(states)

    return Target(make, take)


def _altered(rng: random.Random, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made = dict(tensors)
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice(list(made)) if made else "weights"
        value = made.pop(name, torch.zeros(1))
        kind = rng.randrange(7)
        if kind == 0:
            continue
        if kind == 1:
            name = rng.choice(["clients/", "server/x", "weights", name + "x", ""])
        elif kind == 2:
            value = value.to(rng.choice([torch.float64, torch.int64, torch.uint8, torch.bfloat16, torch.bool]))
        elif kind == 3:
            value = value.reshape(-1)[: rng.randint(0, max(value.numel(), 1))].clone()
        elif kind == 4:
            value = torch.full_like(value, rng.choice([-1, 0, 1, 100]))
        elif kind == 5 and not value.dtype.is_floating_point and value.dtype is not torch.bool:
            value = torch.full_like(value, rng.choice([2**62, -(2**62)]) if value.dtype is torch.int64 else 0)
        else:
            value = torch.zeros([rng.randint(0, 4) for _ in range(rng.randint(0, 3))])
        made[name] = value
    return made
