"""Methods joined by ``+``: one object with the same hooks that calls the parts in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from isofed import spec
from isofed.errors import BadMethod, UserError, unknown
from isofed.layout import Policy, Tensors
from isofed.methods.base import Draws, Final, Method, Round, Run, Step, Visit
from isofed.methods.given import (
    check_facts,
    check_gradient,
    check_plan,
    check_policies,
    check_report,
    check_round,
    check_sent,
    check_tensors,
    check_term,
    check_vector,
    goes_nowhere,
)
from isofed.methods.guard import GUARDED, check_extras, check_parts, check_statistics
from isofed.methods.needs import check_need
from isofed.methods.registry import check_class, find, is_ours, name_of, names
from isofed.models.adapter import check_outputs
from isofed.models.base import Network
from isofed.plugins import is_file_reference, shorten

PLACES_OWNED = {
    "head": "the classifier head",
    "base": "the base loss",
    "noise": "the noise on updates",
    "combine": "how client updates are combined",
    "server": "the server step",
    "final": "the head after the last round",
}


class Composition:
    """The parts of a method and the hooks they share.

    Hooks that nobody in a composition overrides cost nothing: the lists of those who do are made once.
    """

    def __init__(self, parts: tuple[tuple[str, Method], ...]) -> None:
        self.parts = parts
        self._shown = tuple((shorten(name), m) for name, m in parts)  # as a person would type it, for messages
        methods = [m for _, m in parts]
        self._check(self._shown)
        self.owners = {place: m for m in methods for place in m.owns}
        self.pooled = any(m.pooled for m in methods)
        self.pull = sum(m.pull for m in methods)
        self.full_gradient = any(m.full_gradient for m in methods)
        self.copies = tuple(dict.fromkeys(c for m in methods for c in m.copies))
        self.host = tuple(dict.fromkeys(name for m in methods for name in m.host))
        self.exchanges = tuple((e, m) for m in methods for e in m.exchanges)
        self.uniform = any(m.uniform for m in methods)
        self.guards = frozenset(what for m in methods for what in m.guards)
        # Noise is scaled by a bound, so it comes with one.
        self.bound = min((m.bound for m in methods if m.bound), default=1.0 if "noise" in self.owners else None)

        def who(hook: str) -> list[Any]:
            return [getattr(m, hook) for m in methods if getattr(type(m), hook) is not getattr(Method, hook)]

        self._named = {id(m): name for name, m in self._shown}
        self._check_settings, self._share = who("check"), who("share")
        # Whoever owns the head builds it on the features that the others leave.
        self._build = sorted(who("build"), key=lambda hook: "head" in hook.__self__.owns)
        self._client_state, self._server_state, self._send = who("client_state"), who("server_state"), who("send")
        self._begin, self._end, self._batch = who("begin"), who("end"), who("batch")
        # Noise is the last thing that is done to an update, wherever it is written.
        self._upload = sorted(who("upload"), key=lambda hook: "noise" in hook.__self__.owns)
        self._receive = who("receive")
        self._loss, self._around, self._gradient = who("loss"), who("around"), who("gradient")
        # Who owns the combination makes the update that the others see, and who owns the server's step acts on what
        # they make of it, wherever they are written.
        self._aggregate = sorted(
            who("aggregate"), key=lambda hook: ("server" in hook.__self__.owns) - ("combine" in hook.__self__.owns)
        )
        self._evaluated = who("evaluated")
        self._planners = [(n, m) for n, m in parts if type(m).plan is not Method.plan]
        self._base = self.owners["base"].base if "base" in self.owners else None

    @staticmethod
    def _check(parts: tuple[tuple[str, Method], ...]) -> None:
        for name, method in parts:
            check_facts(name, method)
            _check_places(name, method)
        for place, what in PLACES_OWNED.items():
            owners = [(name, m) for name, m in parts if place in m.owns]
            if len(owners) > 1:
                hints = [f", or {name}:{m.leaves[place]}" for name, m in owners if place in m.leaves]
                raise UserError(
                    f"'{owners[0][0]}' and '{owners[1][0]}' both decide {what}; use one of them{''.join(hints)}"
                )
        asked = [question for _, m in parts for question in m.exchanges]
        for question in asked:
            if asked.count(question) > 1:
                raise UserError(f"two parts of the method ask the clients the same question '{question}'")
        names = [name for name, _ in parts]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"'{name}' appears twice in the method '{'+'.join(names)}'; write it once")
        if any(m.pooled for _, m in parts) and len(parts) > 1:
            pooled = next(name for name, m in parts if m.pooled)
            raise UserError(f"'{pooled}' trains on the pooled data without a federation, so it cannot be combined")
        check_parts(parts)

    def __str__(self) -> str:
        return "+".join(str(spec.describe(m, n)) for n, m in self.parts)

    def shown(self) -> str:
        """The text for a person's eyes: files relative to the present folder."""
        return "+".join(str(spec.describe(m, shorten(n))) for n, m in self.parts)

    def to_yaml(self) -> list[Any]:
        """The parts with every hyper-parameter spelled out, for a record that outlives changed defaults."""
        return spec.to_yaml(tuple(spec.describe(m, n, full=True) for n, m in self.parts))

    def check(self, settings: Any) -> None:
        for hook in self._check_settings:
            hook(settings)

    def build(self, network: Network, classes: int, rng: np.random.Generator) -> None:
        for name, method in self._shown:
            for need in method.needs:
                check_need(name, need, network)
        for hook in self._build:
            if (back := hook(network, classes, rng)) is not None:
                raise goes_nowhere(f"build() of '{self._name(hook)}'", back, "the network")
        own = [f"'{self._name(hook)}'" for hook in self._build if not is_ours(type(hook.__self__))]
        if own and network.shape is not None:
            check_outputs(f"the network after build() of {' and '.join(own)}", network, network.shape, classes)

    def share(self, network: Network) -> dict[str, Policy]:
        policies: dict[str, Policy] = {}
        for hook in self._share:
            given = hook(network)
            check_policies(f"share() of '{self._name(hook)}'", given)
            for name, policy in given.items():
                if policies.get(name, policy) != policy:
                    they = f"two parts of '{self.shown()}'"
                    raise UserError(f"{they} disagree about the tensor '{name}': {policies[name]} and {policy}")
                policies[name] = policy
        check_statistics(self._shown, network, policies)
        return policies

    def client_state(self, run: Run) -> Tensors:
        return self._merge("client state", self._client_state, run)

    def server_state(self, run: Run) -> Tensors:
        return self._merge("server state", self._server_state, run)

    def send(self, server: Tensors) -> Tensors:
        return self._merge("message", self._send, server)

    def _merge(self, what: str, hooks: list[Any], given: Any) -> Tensors:
        merged: Tensors = {}
        for hook in hooks:
            one = hook(given)
            check_tensors(f"the {what} of '{self._name(hook)}'", one)
            clash = sorted(set(one) & set(merged))
            if clash:
                raise UserError(f"two parts of '{self.shown()}' use the same name '{clash[0]}' in their {what}")
            merged |= one
        return merged

    def _act(self, hooks: list[Any], given: Visit | Step | Round, changed: str) -> None:
        """Call hooks that change what they are given, such as ``changed``, and have nothing to give back."""
        for hook in hooks:
            if (back := hook(given)) is not None:
                raise goes_nowhere(f"{hook.__name__}() of '{self._name(hook)}'", back, changed)

    def _name(self, hook: Any) -> str:
        """What the method of a hook is called in a message."""
        return self._named[id(hook.__self__)]

    def plan(self, visit: Visit, rng: Callable[[str], np.random.Generator]) -> Draws:
        """Draws of all parts; ``rng`` gives each part a generator of its own, so parts do not shift each other."""
        draws: Draws = {}
        asked: list[str] = []
        for name, method in self._planners:
            # A file's place on the disk must not decide its draws: only the name of the class in it does.
            key = name.rsplit(":", 1)[-1]
            again = asked.count(key)
            asked.append(key)
            mine = method.plan(visit, rng(f"{key}/{again}" if again else key))
            if not is_ours(type(method)):
                check_plan(f"plan() of '{name}'", mine, visit.steps)
            if taken := sorted(mine.keys() & draws.keys()):
                raise UserError(f"two parts of '{self.shown()}' use the same name '{taken[0]}' in their plans")
            draws |= mine
        return draws

    @property
    def acts_around_visits(self) -> bool:
        """Whether a part does anything before or after a client's steps."""
        return bool(self._begin or self._end or self._upload or self._planners)

    def begin(self, visit: Visit) -> None:
        self._act(self._begin, visit, "visit.state")

    def end(self, visit: Visit) -> None:
        self._leave(self._end, visit)
        check_sent(visit)
        check_extras(self._shown, visit)
        self._leave(self._upload, visit)

    def _leave(self, hooks: list[Any], visit: Visit) -> None:
        """Call hooks that may change the update."""
        part = visit.run.layout.shared_trained
        for hook in hooks:
            self._act([hook], visit, "visit.update")
            if not is_ours(type(hook.__self__)):
                size = torch.Size([part.stop - part.start])
                what = f"{hook.__name__}() of '{self._name(hook)}' must leave"
                check_vector(what, visit.update, size, " in visit.update")

    def batch(self, step: Step) -> None:
        self._act(self._batch, step, "step.inputs")

    def losses(self, step: Step) -> list[Tensor]:
        """The base loss and every added term; their sum is what is made smaller."""
        if self._base:
            step.base_loss = self._base(step)
            self._check_term(self._base, "base loss", step.base_loss, step)
        else:
            step.base_loss = cross_entropy(step.logits, step.targets)
        found = [step.base_loss]
        for hook in self._loss:
            term = hook(step)
            if term is not None:
                self._check_term(hook, "loss", term, step)
                found.append(term)
        return found

    def _check_term(self, hook: Any, what: str, term: Tensor, step: Step) -> None:
        check_term(f"the {what} of '{self._name(hook)}'", term)
        # Ours are known to have one, except where a network leaves them nothing to train.
        if not term.requires_grad and not is_ours(type(hook.__self__)):
            check_gradient(f"the {what} of '{self._name(hook)}'", step)

    def around(self, step: Step, inner: Callable[[], None]) -> None:
        """Nested wrappers; the rightmost part of a composition is outermost."""
        for hook in self._around:
            inner = self._wrapped(hook, step, inner)
        inner()

    def _wrapped(self, hook: Any, step: Step, inner: Callable[[], None]) -> Callable[[], None]:
        def wrapped() -> None:
            if (back := hook(step, inner)) is not None:
                raise goes_nowhere(f"around() of '{self._name(hook)}'", back, "step.grad")

        return wrapped

    @property
    def wrappers(self) -> list[str]:
        """What the parts around the passes are called in a message; ours do call ``inner``."""
        return [self._name(hook) for hook in self._around if not is_ours(type(hook.__self__))]

    @property
    def theirs(self) -> str:
        """What the parts that are not of this package are called in a message."""
        return " or ".join(f"'{name}'" for name, part in self._shown if not is_ours(type(part)))

    @property
    def ours(self) -> bool:
        """Whether all parts are of this package, and none is somebody's own."""
        return all(is_ours(type(part)) for _, part in self.parts)

    @property
    def wraps(self) -> bool:
        """Whether a part wraps the passes."""
        return bool(self._around)

    @property
    def passes_first(self) -> bool:
        """Whether nobody puts a gradient there before the first pass, or looks at what is there.

        Somebody's own method may do so whatever it says, so it is not asked: being wrong would be silent.
        """
        return all(is_ours(type(hook.__self__)) and hook.__self__._passes_first for hook in self._around)

    @property
    def corrects(self) -> bool:
        """Whether a part corrects the gradient."""
        return bool(self._gradient)

    @property
    def leaves_gradient(self) -> bool:
        """Whether no part looks at the gradient between the passes and the update; somebody's own may anywhere."""
        return self.ours and not self.wraps and not self.corrects

    def gradient(self, step: Step) -> None:
        self._act(self._gradient, step, "step.grad")

    @property
    def gathers(self) -> bool:
        """Whether the server needs each client's update and not only their mean."""
        owner = self.owners.get("combine")
        return owner is not None and type(owner).combine is not Method.combine

    @property
    def receives(self) -> bool:
        """Whether a part changes updates as they arrive."""
        return bool(self._receive)

    def receive(self, update: Tensor) -> Tensor:
        for hook in self._receive:
            counts = hook(update, self.bound)
            check_vector(f"receive() of '{self._name(hook)}' must return", counts, update.shape)
            update = counts
        return update

    def combine(self, updates: Tensor, weights: Tensor) -> Tensor:
        hook = self.owners["combine"].combine
        made = hook(updates, weights)
        check_vector(f"combine() of '{self._name(hook)}' must return", made, updates.shape[1:])
        return made

    def aggregate(self, round: Round) -> None:
        size, declared = round.update.shape, {name: value.shape for name, value in round.server.items()}
        for hook in self._aggregate:
            self._act([hook], round, "round.update")
            check_round(f"aggregate() of '{self._name(hook)}'", round, size, declared)

    def evaluated(self, server: Tensors, size: torch.Size) -> Tensor | None:
        judged = None
        for hook in self._evaluated:
            if (weights := hook(server)) is not None:
                check_vector(f"evaluated() of '{self._name(hook)}' must return", weights, size)
                judged = weights
        return judged

    def answer(self, exchange: str, visit: Visit) -> Tensors:
        hook = dict(self.exchanges)[exchange].answer
        given = hook(exchange, visit)
        check_tensors(f"what answer() of '{self._name(hook)}' returns", given, BadMethod)
        return given

    def finish(self, exchange: str, total: Tensors, final: Final) -> None:
        hook = dict(self.exchanges)[exchange].finish
        if (back := hook(exchange, total, final)) is not None:
            raise goes_nowhere(f"finish() of '{self._name(hook)}'", back, "final.weights")
        check_report(f"final.report that finish() of '{self._name(hook)}' fills", final.report)


def _check_places(name: str, method: Method) -> None:
    """What a method names must exist, and a hook that is only called for who owns or asks something must have that."""
    for fact, known in (("owns", PLACES_OWNED), ("guards", GUARDED)):
        for place in getattr(method, fact):
            if place not in known:
                raise unknown(f"place that '{name}' could have in `{fact}` called", place, known)

    def writes(hook: str) -> bool:
        return getattr(type(method), hook) is not getattr(Method, hook)

    for hook in ("base", "combine"):
        if writes(hook) and hook not in method.owns:
            raise UserError(f"'{name}' writes {hook}() but does not own it; add owns = frozenset({{'{hook}'}})")
    for hook in ("answer", "finish"):
        if writes(hook) and type(method).exchanges is Method.exchanges:
            question = name_of(type(method))
            raise UserError(f"'{name}' writes {hook}() but asks no question; add exchanges = ('{question}',)")


def parse(given: Any) -> Composition:
    """Read a method from its text, from YAML, or from :class:`Method` objects (one or a list).

    >>> str(parse("fedprox:mu=0.1+fedbn"))
    'fedprox:mu=0.1+fedbn'
    """
    if isinstance(given, Composition):
        return given
    if isinstance(given, Method):
        given = [given]
    if isinstance(given, type) and issubclass(given, Method):
        raise UserError(f"{given.__name__} is a class: give an object of it, method={given.__name__}()")
    if isinstance(given, (list, tuple)) and given and any(isinstance(g, (Method, type)) for g in given):
        return Composition(tuple(p for g in given for p in _parts_of(g)))
    return Composition(tuple(_make(c) for c in spec.parse(given, "method")))


def _parts_of(given: Any) -> tuple[tuple[str, Method], ...]:
    if isinstance(given, Method):
        name, cls = name_of(type(given)), type(given)
        # A class of one's own that is called like a known method must not be taken for it when a run is resumed.
        if name in names() and find(name)[1] is not cls:
            name = f"{cls.__module__}.{cls.__qualname__}"
        check_class(cls.__name__, cls)
        return ((name, given),)
    return parse(given).parts


def portable(method: Composition) -> bool:
    """Whether another process could make this method from its text: not so for classes defined in a session."""
    try:
        return all(find(name)[1] is type(part) for name, part in method.parts)
    except UserError:
        return False


def _make(choice: spec.Choice) -> tuple[str, Method]:
    name, cls = find(choice.name)
    # Messages say a file's method as it was typed, the record as it can be found from anywhere.
    said = choice.name if is_file_reference(choice.name) else name
    return name, spec.make(cls, dataclasses.replace(choice, name=said), "method")
