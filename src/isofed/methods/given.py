"""What the hooks of a method give back, checked where nothing has to be read from the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from isofed.errors import BadMethod, IsofedError, UserError
from isofed.words import kind_of

if TYPE_CHECKING:
    from isofed.methods.base import Method, Round, Step, Visit


RECORDED = ("exchange", "bytes_up", "bytes_down")  # of a question, beside what its method reports

_FACTS: dict[str, type[tuple[str, ...]] | type[frozenset[str]]] = {
    **dict.fromkeys(("needs", "copies", "host", "exchanges", "extras"), tuple),
    **dict.fromkeys(("owns", "guards"), frozenset),
}


def check_facts(name: str, method: Method) -> None:
    """Refuse a text where a class lists texts, whose letters would be taken for them: a comma was forgotten."""
    for fact, kind in _FACTS.items():
        given = getattr(method, fact)
        if isinstance(given, str):
            raise UserError(f"'{name}' has {fact} = {given!r}, which is one text: write {fact} = {kind([given])!r}")
        if not isinstance(given, (tuple, list, set, frozenset)) or not all(isinstance(one, str) for one in given):
            raise UserError(f"{fact} of '{name}' must be a {kind.__name__} of texts, not {given!r}")


def check_term(what: str, term: Any) -> None:
    """Refuse a loss that is not a tensor of one number."""
    if not isinstance(term, Tensor):
        raise BadMethod(f"{what} must be a tensor of one number, not {kind_of(term)}; None adds nothing")
    if term.dim():
        raise BadMethod(f"{what} must be one number, not {list(term.shape)}: take its mean or its sum")


def check_gradient(what: str, step: Step) -> None:
    """Refuse a loss without a gradient, unless the network gives it none: where the encoder is frozen.

    A term that is zero for a batch, but still a function of what the network gave, has a gradient.
    """
    given = (step.logits, step.features)
    if all(one.requires_grad for one in given if isinstance(one, Tensor)):
        raise BadMethod(
            f"{what} does not depend on the network's outputs, so it trains nothing: change step.grad in `gradient` "
            "instead, or return None where there is nothing to add"
        )


def goes_nowhere(what: str, back: Any, changed: str) -> BadMethod:
    """The error for a hook that gives something back though nobody takes it: its author thinks that it counts."""
    return BadMethod(
        f"{what} returns {kind_of(back)}, which goes nowhere: change {changed} instead, and return nothing"
    )


def no_pass(wrappers: list[str]) -> BadMethod:
    """The error for a step in which one of these methods has kept the passes from being made."""
    who = " or ".join(f"'{name}'" for name in wrappers)
    return BadMethod(
        f"around() of {who} did not call inner(), which trains on the losses of all parts: call it once or more"
    )


def check_sent(visit: Visit) -> None:
    """Refuse what is no tensor among what a client sends beside its update."""
    for place, sent in (("mean", visit.mean), ("sum", visit.sum)):
        for name, value in sent.items():
            if not isinstance(value, Tensor):
                raise BadMethod(
                    f"visit.{place}['{name}'] must be a tensor, not {kind_of(value)}: write torch.tensor(...)"
                )


def check_plan(what: str, given: Any, steps: int) -> None:
    """Refuse draws that are no array with a row for each step of a visit."""
    if not isinstance(given, dict):
        raise BadMethod(f"{what} must return a dict of named arrays, not {kind_of(given)}; without draws an empty one")
    for name, rows in given.items():
        if not isinstance(rows, np.ndarray):
            raise BadMethod(f"{what} must return NumPy arrays, and '{name}' is {kind_of(rows)}")
        if not rows.ndim or len(rows) != steps:
            size = f"has {len(rows)} rows" if rows.ndim else "is a single number"
            raise BadMethod(f"{what} must return a row for each of the visit's {steps} steps, and '{name}' {size}")


def check_vector(what: str, given: Any, size: torch.Size, where: str = "") -> None:
    """Refuse a vector of another size; ``what`` says who must do what with it."""
    if not isinstance(given, Tensor) or given.shape != size:
        found = list(given.shape) if isinstance(given, Tensor) else kind_of(given)
        raise BadMethod(f"{what} {list(size)} numbers{where}, not {found}")


def check_policies(what: str, given: Any) -> None:
    """Refuse what is not a dict of policies; each of them is looked at where the tensors are known."""
    if not isinstance(given, dict):
        raise UserError(
            f"{what} must return a dict of policies by name, not {kind_of(given)}; without any an empty one"
        )


def check_round(what: str, round: Round, size: torch.Size, declared: dict[str, torch.Size]) -> None:
    """Refuse an update of another size, and a state of the server that cannot be taken up in the next round."""
    check_vector(f"{what} must leave", round.update, size, " in round.update")
    if strange := sorted(round.server.keys() ^ declared.keys()):
        raise BadMethod(f"{what} changes which names round.server has: '{strange[0]}' belongs into server_state()")
    for name, shape in declared.items():
        left = round.server[name]
        if not isinstance(left, Tensor) or left.shape != shape:
            found = f"one of {list(left.shape)}" if isinstance(left, Tensor) else kind_of(left)
            raise BadMethod(
                f"{what} must leave a tensor of {list(shape)} in round.server['{name}'], as server_state() declares, "
                f"not {found}"
            )


def check_answer(what: str, name: str, given: Tensor, before: Tensor, joined: bool) -> None:
    """Refuse an answer that cannot be put to those of the clients before."""
    if given.shape[joined:] != before.shape[joined:]:
        how = "with rows of one shape" if joined else "of one shape"
        shapes = f"{list(given.shape)} after {list(before.shape)}"
        raise BadMethod(f"{what} must hold tensors {how} from all clients, and '{name}' has {shapes}")


def check_report(what: str, report: Any) -> None:
    """Refuse figures that a record cannot hold, or that would take the place of its own."""
    if not isinstance(report, dict):
        raise BadMethod(f"{what} must be a dict of numbers by name, not {kind_of(report)}")
    for name, value in report.items():
        if not isinstance(name, str) or name in RECORDED:
            raise BadMethod(f"{what} cannot have the name {name!r}; use another text")
        if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
            hint = ": take float(...) of it" if isinstance(value, Tensor) and value.numel() == 1 else ""
            raise BadMethod(f"{what} must hold numbers, and '{name}' is {kind_of(value)}{hint}")


def anatomy(network: nn.Module) -> list[tuple[int, ...]]:
    """What a network is made of: its modules, their parameters, and how many hooks they have."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [
        (id(module), *map(id, module._parameters.values()), *(len(vars(module)[kind]) for kind in hooks))
        for module in network.modules()
    ]


def check_anatomy(theirs: str, network: nn.Module, before: list[tuple[int, ...]]) -> None:
    """Refuse a network in which a layer or a parameter was replaced, or a hook was left behind, in a visit."""
    if anatomy(network) != before:
        raise BadMethod(
            f"{theirs} has replaced a layer or a parameter of the network, or left a hook in it, which would stay for "
            "whoever comes next: do that in `build`, or change values in place"
        )


def check_tensors(what: str, given: Any, error: type[IsofedError] = UserError) -> None:
    """Refuse what is not a dict of named tensors."""
    if not isinstance(given, dict):
        raise error(f"{what} must be a dict of named tensors, not {kind_of(given)}")
    for name, value in given.items():
        if not isinstance(name, str) or name.startswith("isofed."):
            raise error(f"{what} has a name {name!r}; use a text that begins with the method's name and a dot")
        if not isinstance(value, Tensor):
            raise error(f"{what} must hold tensors, and '{name}' is {kind_of(value)}: write torch.tensor(...)")
