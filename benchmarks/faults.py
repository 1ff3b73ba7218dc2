"""A fault campaign: a federation on this machine whose sites and server fail at random, for hundreds of rounds.

    python benchmarks/faults.py rounds=200 sites=4 out=runs/faults
    python benchmarks/faults.py go-on out=runs/faults              a campaign that was broken off

Sites send NaN, wrong shapes, updates of another round, and updates 10,000 times too long, answer after the deadline,
or die in the middle of a visit; sites and the server are killed (SIGKILL) at random moments and started again. At the
end the record is checked:

- every round is there once, complete or skipped with a reason; every update that was left out names its site and why;
- a simulation that uses in each round the sites which the record says were used ends with the same bits, so nothing was
  counted twice, and nothing that was left out had any effect;
- SCAFFOLD's control variate at the server is the mean of those on the sites' disks, so each site has committed exactly
  the visits that the server has used.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isofed.engine.replica import Job, Outcome
from isofed.engine.serial import Serial, States
from isofed.errors import RunError
from isofed.federation import Federation
from isofed.files import load_tensors
from isofed.flower import terms
from isofed.flower.executor import TOKEN
from isofed.flower.local import Local
from isofed.flower.project import read_table, write_project
from isofed.layout import Tensors
from isofed.progress import Watcher
from isofed.store import Remembered

FAULTS = {"nan": 0.02, "shape": 0.02, "stale": 0.02, "long": 0.02, "late": 0.01, "died": 0.01}  # chance of a visit
KILLED = {"site": 0.06, "server": 0.05}  # chance within a round
DEADLINE = 20.0
WORDS = ("rounds", "sites", "out", "seed", *KILLED, "go-on")

# Runs at the sites, in place of the project's own app.
FAULTY = """
import os, random, signal, time

from flwr.app import Array, Message
from flwr.clientapp import ClientApp

from isofed.flower.client_app import answer

FAULTS = @FAULTS@
app = ClientApp()


@app.query()
def query(message, context):
    return Message(content=answer(message, context), reply_to=message)


@app.train()
def train(message, context):
    facts = message.content["facts"]
    rng = random.Random(f"{facts['client']} {facts['round']} {time.time()}")
    (fault,) = rng.choices([*FAULTS, "none"], [*FAULTS.values(), 1 - sum(FAULTS.values())])
    if fault == "died":
        os.kill(os.getpid(), signal.SIGKILL)
    content = answer(message, context)
    arrays = content["arrays.0"]
    update = arrays["update"]
    if fault == "nan":
        arrays["update"] = Array(update.dtype, update.shape, update.stype, bytes.fromhex("0000c07f") + update.data[4:])
    elif fault == "shape":
        arrays["update"] = Array(update.dtype, (update.shape[0] - 1,), update.stype, update.data[:-4])
    elif fault == "stale":
        content["facts"]["round"] = max(1, facts["round"] - 1) + 10000 * (facts["round"] == 1)
    elif fault == "long":
        import numpy as np

        longer = np.frombuffer(update.data, np.float32) * np.float32(10000)
        arrays["update"] = Array(update.dtype, update.shape, update.stype, longer.tobytes())
    elif fault == "late":
        time.sleep(@LATE@)
    return Message(content=content, reply_to=message)
"""


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    given = dict(word.partition("=")[::2] for word in sys.argv[1:])
    if wrong := [word for word in given if word not in WORDS]:
        raise SystemExit(f"'{wrong[0]}' is none of the words that this takes: {', '.join(WORDS)}")
    rounds, sites = int(given.get("rounds", 200)), int(given.get("sites", 4))
    out, seed = Path(given.get("out", "runs/faults")).resolve(), int(given.get("seed", 0))
    KILLED.update({name: float(given[name]) for name in KILLED if name in given})
    if "go-on" in given:  # with a campaign that was broken off
        table = read_table(out / "app")
    else:
        if out.exists() and any(out.iterdir()) and not (out / "app" / "federation").is_dir():
            raise SystemExit(f"{out} is not a campaign's folder, and would be emptied; choose another out=")
        shutil.rmtree(out, ignore_errors=True)
        table = begin(out, rounds, sites, seed)
    kills = campaign(Local(out / "app", out / "work"), out, random.Random(seed + done(out / "run")))
    report(out, table, kills)


def begin(out: Path, rounds: int, sites: int, seed: int) -> dict[str, Any]:
    """Write the project, with sites that fail."""
    table = write_project(
        out / "app",
        {
            "data": "digits", "partition": "dirichlet:0.5", "model": "mlp", "method": "scaffold", "clients": sites,
            "rounds": rounds, "lr": 0.02, "local_epochs": 1, "min_clients": 2, "deadline": DEADLINE, "patience": 120.0,
            "evaluate_every": 10, "seed": seed, "out": str(out / "run"),
        },
    )  # fmt: skip
    text = FAULTY.replace("@FAULTS@", repr(FAULTS)).replace("@LATE@", repr(DEADLINE + 3))
    (out / "app" / "federation" / "client_app.py").write_text(text)
    return table


def campaign(local: Local, out: Path, rng: random.Random) -> Counter[str]:
    """Keep a federation running while its processes are killed, until it has a result. Gives what was done to it."""
    folder, counts = out / "run", out / "campaign.json"
    kills: Counter[str] = Counter(json.loads(counts.read_text()) if counts.exists() else {})
    before = time.monotonic() - kills["seconds"]
    away: dict[int, float] = {}  # sites that are dead, and when they come back
    with local:
        while not (folder / "result.json").exists():
            with local.control() as control:
                run, seen = control.start(local.app), done(folder)
                print(f"round {seen}, started again; {dict(kills)}", flush=True)
                kills["runs started"] += 1
                while True:
                    time.sleep(0.5)
                    kills["seconds"] = int(time.monotonic() - before)
                    counts.write_text(json.dumps(kills))
                    local.revive()
                    for number in [n for n, until in away.items() if time.monotonic() > until]:
                        del away[number]
                        local.start_site(number)
                    try:
                        if control.status(run).over:
                            break
                    except RunError:
                        break
                    now = done(folder)
                    for _ in range(max(0, now - seen)):
                        if rng.random() < KILLED["site"] and not away and (folder / "config.yaml").exists():
                            number = rng.randrange(local.sites)
                            time.sleep(rng.random() * 4)
                            local.groups[number].kill()
                            away[number] = time.monotonic() + rng.choice([0.0, 5.0, 40.0])
                            kills["sites killed"] += 1
                        if rng.random() < KILLED["server"]:
                            time.sleep(rng.random() * 4)
                            local.server.kill()
                            kills["servers killed"] += 1
                    seen = now
                    if not local.server.running:
                        break
            if not local.server.running:
                local.start_server()
    return kills


def done(folder: Path) -> int:
    """Rounds recorded so far."""
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


class Replay(Federation):
    """A simulation of what a record says has happened."""

    def __init__(self, lines: list[dict[str, Any]], **settings: Any) -> None:
        super().__init__(**settings)
        self.lines = lines

    def _make_executor(self, watch: Watcher) -> Any:
        import contextlib

        return contextlib.nullcontext(_Chosen(self))

    def _too_few(self, number: int, *_: Any) -> str | None:
        return self.lines[number - 1].get("skipped")


class _Chosen(Serial):
    """Visits only those whom the record names."""

    def __init__(self, run: Replay) -> None:
        super().__init__(run.world, run.device)
        self.lines = run.lines

    def train(self, jobs: Sequence[Job], weights: Tensor, sent: Tensors, states: States) -> Iterator[Outcome]:
        used = self.lines[jobs[0].round - 1]["sites"]
        return super().train([job for job in jobs if job.client in used], weights, sent, states)


def report(out: Path, table: dict[str, Any], kills: Counter[str]) -> None:
    """Check the record, and print what has happened."""
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    settings, _ = terms.read(table)
    assert [line["round"] for line in lines] == list(range(1, settings.rounds + 1)), (
        "a round is missing, or twice there"
    )
    skipped = [line for line in lines if line.get("skipped")]
    for line in lines:
        assert line.get("skipped") or line["clients"] == len(line["sites"]) >= 2, f"round {line['round']} is neither"
        left = {event["client"] for event in line["events"] if "too late" not in event["event"]}
        assert left | set(line["sites"]) == set(range(settings.clients or 0)) or line.get("skipped")
        assert not left & set(line["sites"]), f"round {line['round']} uses an update that it has left out"
        assert all("(site 'site-" in event["event"] for event in line["events"]), "an event names no site"
    events = Counter(kind(event["event"]) for line in lines for event in line["events"])
    replay = Replay(lines, **settings.to_dict()).fit()
    model, _ = load_tensors(out / "run" / "model.safetensors")
    difference = max(float((model[k] - v).abs().max()) for k, v in replay.weights.items())
    minutes, complete = kills.pop("seconds") / 60, len(lines) - len(skipped)
    print(f"{len(lines)} rounds in {minutes:.0f} min: {complete} complete, {len(skipped)} skipped")
    for name, count in [*sorted(kills.items()), *events.most_common()]:
        print(f"{count:5d}  {name}")
    print(f"updates used: {sum(len(line['sites']) for line in lines)} of {len(lines) * (settings.clients or 0)}")
    print(f"largest difference of a weight from the replay in simulation: {difference:g}")
    print(f"largest difference of the server's control variate from the sites': {control_variates(out, settings):.2g}")
    print(f"accuracy {replay.accuracy:.4f}")
    assert difference == 0, "the final model is not the one that its record says"


def control_variates(out: Path, settings: Any) -> float:
    """How far SCAFFOLD's c at the server is from the weighted mean of those on the sites' disks."""
    newest = max((out / "run" / "checkpoints").glob("round-*.safetensors"))
    saved, _ = load_tensors(newest)
    server = saved["server/scaffold.c"].double()
    index = {k.removeprefix("clients/"): v for k, v in saved.items() if k.startswith("clients/")}
    tokens = Remembered.restored(index, settings.clients, out / "run" / "checkpoints" / "clients.bin")
    fractions = Federation(**settings.to_dict()).world.fractions()
    mean = torch.zeros_like(server)
    for client, token in tokens.items():
        round = int(token[TOKEN][1])
        (state,) = (out / "work" / "states" / f"site-{client}").glob(f"*/round-{round:06d}.safetensors")
        mean += float(fractions[client]) * load_tensors(state)[0]["scaffold.ck"].double()
    return float((server - mean).abs().max())


def kind(event: str) -> str:
    """An event without its numbers."""
    text = re.sub(r"\(site '[^']*'\) ", "", event)
    text = re.sub(r"'update' as .*", "an update of the wrong shape", text)
    return re.sub(r"[0-9][0-9.e+]*", "N", text)


if __name__ == "__main__":
    main()
