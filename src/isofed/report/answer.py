"""The question that runs ask, and its answer in sentences: which method, by how much, how sure, at what cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from isofed.data import AT_SITES
from isofed.display import duration, percent
from isofed.report.gather import Found
from isofed.stats import Difference, paired_difference
from isofed.tables import Row, comparison
from isofed.words import many

SURE = ("so far", "how sure")  # details without which a headline would claim too much


@dataclass(frozen=True)
class Answer:
    """Plain texts; ``details`` are pairs of a few words and a sentence."""

    question: str
    headline: str
    details: list[tuple[str, str]]


def compared(found: Found) -> dict[str, list[Row]]:
    """The table of each data set; within it, rows differ from its first row."""
    return {
        name: comparison(found.batch, labels, found.target) for name, labels in found.labels_by_data().items() if labels
    }


def answer(found: Found) -> Answer:
    """The answer that the finished runs give; where they are of several data sets, one for each."""
    groups = found.by_data()
    if len(groups) > 1:
        return _apart(groups)
    rows = [row for table in compared(found).values() for row in table]
    done = [row for row in rows if row.accuracy is not None]
    running = sum(run.result is None for run in found.runs)
    state = f"{len(found.runs) - running} of {many(len(found.runs), 'run')} finished" if running else ""
    if not done:
        return Answer(_question(found), "There is no finished run yet.", [("so far", _so_far(found))])
    best = _winner(found, done)
    if len(done) == 1:
        return Answer(_question(found), _alone(best), _details(found, best, rows, state))
    if level := _level(found, best, done):
        names = _listed([best.method, *(row.method for row in level)])
        headline = f"{names} are level, with {_accuracy(best)}."
        return Answer(_question(found), headline, _details(found, best, rows, state))
    return Answer(_question(found), f"{best.method}, with {_accuracy(best)}.", _details(found, best, rows, state))


def _apart(groups: Mapping[str, Found]) -> Answer:
    """No winner over all: an accuracy on one data set is neither more nor less than one on another."""
    count = len(groups)
    details = []
    for name, found in groups.items():
        said = answer(found)
        words = said.headline
        if len(found.rows) == 1:
            words = f"{next(iter(found.rows))} alone: {words}"
        details.append((name, " ".join([words, *(text for what, text in said.details if what in SURE)])))
    return Answer(
        f"Which method gets furthest on each of these {count} data sets?",
        f"No single one: these are runs on {count} data sets, and accuracies on different data do not compare.",
        details,
    )


def _winner(found: Found, done: Sequence[Row]) -> Row:
    """The highest mean accuracy; training on pooled data is a bound, not a rival."""
    rivals = [row for row in done if not _pooled(found, row)] or done
    return max(rivals, key=lambda row: row.accuracy or 0.0)


def _level(found: Found, best: Row, done: Sequence[Row]) -> list[Row]:
    """Those that are as good as the best."""
    rivals = [row for row in done if row is not best and not _pooled(found, row)]
    return [row for row in rivals if abs((row.accuracy or 0.0) - (best.accuracy or 0.0)) < 1e-9]


def _pooled(found: Found, row: Row) -> bool:
    return all(run.pooled for run in found.rows[row.method].values())


def _question(found: Found) -> str:
    common, methods = found.common(), len(found.rows)
    kind = "methods" if len(found.methods) == methods else "settings"
    what = f"Which of these {methods} {kind} gets furthest"
    if methods < 2:
        what = f"How far does {next(iter(found.rows), 'it')} get"
    if "data" not in common:
        return f"{what}?"
    if common["data"] == AT_SITES:  # which have what they have
        parts = [f"{what} at {many(common['clients'], 'site')}" if common.get("clients") else f"{what} at real sites"]
    else:
        parts = [f"{what} on {Path(str(common['data'])).name}"]
    if "partition" in common and common["data"] != AT_SITES:
        clients = f" over {many(common['clients'], 'client')}" if common.get("clients") else ""
        parts.append(f"split by {common['partition']}{clients}")
    if "rounds" in common:
        parts.append(f"in {many(common['rounds'], 'round')}")
    return ", ".join(parts) + "?"


def _accuracy(row: Row) -> str:
    spread = f" ± {100 * row.std:.1f}" if row.std is not None else ""
    return f"{percent(row.accuracy)}{spread} % accuracy"


def _alone(row: Row) -> str:
    over = f", mean and standard deviation over {many(row.seeds, 'seed')}" if row.seeds > 1 else ""
    return f"{_accuracy(row)}{over}."


def _details(found: Found, best: Row, rows: Sequence[Row], state: str) -> list[tuple[str, str]]:
    done = [row for row in rows if row.accuracy is not None]
    level = _level(found, best, done)
    others = [row for row in done if row is not best and row not in level and not _pooled(found, row)]
    bounds = [row for row in done if row is not best and _pooled(found, row)]
    said = [("so far", f"{state}; this is the answer of those that are.")] if state else []
    if others:
        said.append(("by how much", _by_how_much(found, best, rows[0], others)))
        said.append(("how sure", _how_sure(found, best, others)))
    elif best.seeds == 1:
        said.append(("how sure", "One run says nothing about chance: another seed may give another accuracy."))
    said.append(("at what cost", (f"{best.method}: " if level else "") + _cost(found, best, rows[0])))
    for row in bounds:
        said.append(("upper bound", f"{row.method} trains on the pooled data, without a federation: {_accuracy(row)}."))
    if found.target is not None and best.rounds_to_target is not None:
        share = f"{100 * found.target:g} %"
        who = best.method if level else "It"
        text = f"{who} reached {share} after {best.rounds_to_target:.1f} rounds."
        if best.reached < best.seeds:
            seeds = f"{best.reached} of {many(best.seeds, 'seed')}"
            text = f"{who} reached {share} in {seeds} only, within {many(best.rounds or 0, 'round')}."
        said.append(("to the target", text))
    said += [("privacy", _privacy(found, row)) for row in done if row.epsilon is not None]
    return said


def _privacy(found: Found, row: Row) -> str:
    records = [result.privacy or {} for result in found.batch.results[row.method].values()]
    against = dict.fromkeys(str(record["protects against"]) for record in records if record.get("protects against"))
    shield = f", against {' or '.join(against)}" if against else ""
    whole = f"epsilon {row.epsilon:.3g} at delta {row.delta:g} for a whole client{shield}."
    return f"{row.method}: {whole}" if len(found.rows) > 1 else whole.capitalize()


def _by_how_much(found: Found, best: Row, base: Row, others: Sequence[Row]) -> str:
    second = max(others, key=lambda row: row.accuracy or 0.0)
    texts = [] if base in (best, second) or base not in others else [_margin(found, best, base)]
    texts.append(f"{_margin(found, best, second)}, the next best")
    return "; ".join(texts) + "."


def _margin(found: Found, best: Row, other: Row) -> str:
    gap = difference(found, best.method, other.method)
    if gap is None:
        points = 100 * ((best.accuracy or 0.0) - (other.accuracy or 0.0))
        return f"{signed(points)} points over {other.method} (they have no seed in common)"
    interval = ""
    if gap.low is not None and gap.high is not None:
        interval = f" (95 % interval {signed(100 * gap.low)} to {signed(100 * gap.high)})"
    return f"{signed(100 * gap.mean)} points over {other.method}{interval}"


def signed(points: float) -> str:
    """``+1.2`` or ``−1.2``, with the sign of typography."""
    return f"{points:+.1f}".replace("-0.0", "+0.0").replace("-", "−")


def difference(found: Found, method: str, other: str) -> Difference | None:
    """The paired difference of two rows' final accuracies, over the seeds that both have finished."""
    a, b = found.batch.results.get(method, {}), found.batch.results.get(other, {})
    common = sorted(set(a) & set(b))
    if not common:
        return None
    return paired_difference([a[s].accuracy for s in common], [b[s].accuracy for s in common])


def _how_sure(found: Found, best: Row, others: Sequence[Row]) -> str:
    if best.seeds == 1:
        return "One seed says nothing about chance. Compare with seeds=3 or more."
    unclear = [row.method for row in others if not _above(difference(found, best.method, row.method))]
    seeds = many(best.seeds, "seed")
    if not unclear:
        text = f"Over {seeds}, every interval of its lead lies above zero."
    elif len(unclear) == len(others):
        text = f"Over {seeds}, it is told apart from none of the others: the lead may be chance."
    else:
        text = (
            f"Over {seeds}, it is not told apart from {_listed(unclear)}; its lead over the rest is more than chance."
        )
    many_rivals = " It was picked as the best of several, which flatters it a little." if len(others) > 2 else ""
    return text + many_rivals


def _above(gap: Difference | None) -> bool:
    return gap is not None and gap.low is not None and gap.low > 0


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _cost(found: Found, best: Row, base: Row) -> str:
    results = found.batch.results[best.method].values()
    sent = sum(r.bytes_up + r.bytes_down for r in results) / len(results) / 1e6
    seconds = sum(r.seconds for r in results) / len(results)
    text = f"{duration(seconds)} of training and {sent:,.1f} MB sent in a run"
    if best is base or base.relative_seconds is None or best.relative_seconds is None:
        return f"{text}."
    text += f"; a round takes {best.relative_seconds:.2f} times as long as with {base.method}"
    if base.megabytes_per_round and best.megabytes_per_round is not None:
        share = best.megabytes_per_round / base.megabytes_per_round
        text += " and sends as much" if abs(share - 1) < 0.005 else f" and sends {share:.2f} times as much"
    return f"{text}."


def _so_far(found: Found) -> str:
    if not found.runs:
        return "There is no run here yet."
    latest = [(run, [x["accuracy"] for x in run.history if x.get("accuracy") is not None]) for run in found.runs]
    judged = [(seen[-1], run) for run, seen in latest if seen]
    rounds = f"{sum(len(run.history) for run in found.runs)} of {sum(run.rounds for run in found.runs)} rounds are done"
    if not judged:
        return f"{rounds}."
    accuracy, run = max(judged, key=lambda pair: pair[0])
    return (
        f"{rounds}; the highest accuracy at this moment is {percent(accuracy)} %, of {run.method} with seed {run.seed}."
    )
