"""Generated answers of a site, as bytes, for the parser that reads them at the server: a target of ``make fuzz``."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as Proto

from isofed.engine.replica import Job
from isofed.flower import terms
from isofed.flower.crew import Crew
from isofed.flower.data import server_world
from isofed.flower.executor import Sites
from isofed.flower.wire import BadMessage
from tests.flower.loop import Loop
from tests.flower.test_equal import table

Make = Callable[[random.Random], bytes]
Take = Callable[[bytes], None]


def message(folder: Path) -> tuple[Make, Take]:
    """Makes an answer that is right in parts, and takes it as the server would: as an update, and an introduction."""
    values = table(folder, method="scaffold")
    settings, given = terms.read(values)
    grid = Loop(values, folder / "states", 2)
    (folder / "run").mkdir(parents=True)
    crew = Crew(grid, given, 2, lambda text: None, bound=True)
    crew.gather()
    sites = Sites(server_world(settings, given, crew.samples), torch.device("cpu"), crew)
    job = Job(1, 0, 0.05, 0.5)
    question = dict(sites._ask("train", [job], {"do": "train"}, sites.initial, sent(sites), lambda client: None))
    right = question[0]
    assert not isinstance(right, str)
    assert sites._outcome(job, right).problem is None
    valid = recorddict_to_proto(right).SerializeToString()

    def make(rng: random.Random) -> bytes:
        chance = rng.random()
        if chance < 0.4:
            return broken(rng, valid)
        return recorddict_to_proto(altered(rng, right)).SerializeToString()

    def take(data: bytes) -> None:
        try:
            content = recorddict_from_proto(Proto.FromString(data))
        except Exception:
            return  # what Flower itself cannot read counts as no answer
        outcome = sites._outcome(job, content)
        assert outcome.problem is None or 20 < len(outcome.problem) < 2500
        try:
            crew._admit(100, content)
        except BadMessage:
            return

    return make, take


def sent(sites: Sites) -> dict[str, Any]:
    method = sites.world.settings.method
    return method.send(method.server_state(sites.local.replica.run))


def broken(rng: random.Random, valid: bytes) -> bytes:
    """Some bytes changed, cut out or doubled."""
    data = bytearray(valid)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(400, len(data)))
        how = rng.randrange(3)
        if how == 0:
            data[at] = rng.randrange(256)
        elif how == 1:
            del data[at : at + rng.randint(1, 30)]
        else:
            data[at:at] = data[at : at + rng.randint(1, 30)]
        if not data:
            return b""
    return bytes(data)


def altered(rng: random.Random, right: RecordDict) -> RecordDict:
    """The same answer with facts or arrays of other kinds."""
    facts, arrays = right["facts"], right["arrays.0"]
    assert isinstance(facts, ConfigRecord)
    assert isinstance(arrays, ArrayRecord)
    plain: dict[str, Any] = dict(facts)
    new = dict(arrays)
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.5:
            name = rng.choice([*plain, "number", "name", "version", "problem", "x" * 300])
            odd = [
                -1,
                2**62,
                1e300,
                float("nan"),
                "",
                "x" * 9000,
                "\x1b[0m\n",
                b"\0",
                [1],
                [0.5],
                ["a"],
                True,
                "9" * 400,
            ]
            plain[name] = rng.choice(odd)
            if rng.random() < 0.2:
                del plain[name]
        else:
            name = rng.choice([*new, "update", "mean/a", ""])
            old = new.get(name) or next(iter(arrays.values()))
            shape = rng.choice([old.shape, (), (0,), (2**30, 2**30), (-1,), (1,) * 60, tuple(reversed(old.shape))])
            dtype = rng.choice([old.dtype, "float64", "object", "int8", "", "float32" * 50])
            data = rng.choice([old.data, b"", old.data[:-1], b"\xff" * len(old.data), rng.randbytes(30)])
            new[name] = Array(dtype, shape, rng.choice([old.stype, "numpy.ndarray", "pickle"]), data)
            if rng.random() < 0.2:
                del new[name]
    made = RecordDict({"facts": ConfigRecord(plain)})
    made[rng.choice(["arrays.0", "arrays", "other"])] = ArrayRecord(new)
    return made
