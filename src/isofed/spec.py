"""The text form of choices with options: ``fedprox:mu=0.01``, ``dirichlet:0.1``, ``crop:4+flip``.

One small grammar serves methods, partitions, data sets, augmentations and schedules::

    choices = choice *( "+" choice )
    choice  = name [ ":" option *( "," option ) ]
    option  = key "=" value | value          (a bare value belongs to the first field that is still free)

A name may also be a file and a class in it, ``path/to/mine.py:MyMethod``. The same in YAML is a list whose
items are names or one-key mappings: ``[fedprox: {mu: 0.01}, fedbn]``. The options of a choice are the fields
of a frozen dataclass, so types, defaults and the list of known keys come from one place. A field whose name would
collide with something else of its class ends in ``_``, which its option does not have.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from typing import Any, Literal, TypeVar

from isofed.errors import UserError, unknown
from isofed.words import many

T = TypeVar("T")
_SIGNS = {"at_least": "at least", "above": "above", "at_most": "at most", "below": "below"}
_PLUS = re.compile(r"(?<![0-9.][eE])\+|\+(?![0-9])")  # a plus between names, not that of an exponent as in 1e+5
_FILE = re.compile(r"^(?P<file>.*?\.py:[A-Za-z_]\w*)(?::(?P<options>.*))?$")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A name with its options, before anything is known about what the name stands for."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()  # a key of "" marks a bare value

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return self.name + ":" + ",".join(f"{k}={show(v)}" if k else show(v) for k, v in self.options)


def show(value: Any) -> str:
    """A value as it is typed: ``true``, ``none``, ``0.01``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def parse(given: Any, kind: str) -> tuple[Choice, ...]:
    """Read choices joined by ``+`` from text, or from the list or mapping a YAML file holds."""
    if isinstance(given, str):
        parts = [p.strip() for p in _PLUS.split(given)]
        if not all(parts):
            raise UserError(f"the {kind} '{given}' has an empty part: write names joined by '+', like 'a+b'")
        return tuple(_parse_one(p, kind) for p in parts)
    if isinstance(given, dict):
        given = [{name: options} for name, options in given.items()]
    if isinstance(given, (list, tuple)) and given:
        return tuple(_from_yaml(item, kind) for item in given)
    raise UserError(f"the {kind} must be a text like 'name:key=value' or a list of such, not {given!r}")


def parse_one(given: Any, kind: str) -> Choice:
    """Read exactly one choice."""
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        given = show(given)
    choices = parse(given, kind)
    if len(choices) != 1:
        raise UserError(f"the {kind} takes one choice, not {len(choices)}: '{given}'")
    return choices[0]


def _parse_one(text: str, kind: str) -> Choice:
    match = _FILE.match(text)
    name, _, rest = (match["file"], "", match["options"] or "") if match else text.partition(":")
    options = []
    for item in filter(None, (p.strip() for p in rest.split(","))):
        key, equals, value = item.partition("=")
        options.append((key.strip(), value.strip()) if equals else ("", item))
    if not name:
        raise UserError(f"the {kind} '{text}' has no name before ':'")
    return Choice(name, tuple(options))


def several(text: str) -> list[str]:
    """The values of a list with commas between them: ``none,crop:2,crop:4+flip``.

    Behind a name with options a comma goes on with these, as in ``dirichlet:alpha=0.5,min=5``, unless the next name
    with options follows it.
    """
    found: list[str] = []
    for piece in filter(None, (p.strip() for p in text.split(","))):
        if found and ":" in found[-1] and ":" not in piece.partition("=")[0]:
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    return found


def _from_yaml(item: Any, kind: str) -> Choice:
    if isinstance(item, str):
        return _parse_one(item, kind)
    if isinstance(item, dict) and len(item) == 1:
        name, options = next(iter(item.items()))
        if options is None:
            return Choice(str(name))
        if isinstance(options, dict):
            return Choice(str(name), tuple((str(k), v) for k, v in options.items()))
        return Choice(str(name), (("", options),))
    raise UserError(f"each part of the {kind} must be a name or 'name: {{option: value}}', not {item!r}")


def make(cls: type[T], choice: Choice, kind: str) -> T:
    """Build the dataclass that a choice names, with every option checked against its fields."""
    fields = [f for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    by_option = {option(f): f.name for f in fields}
    values: dict[str, Any] = {}
    for key, value in choice.options:
        if not key:
            free = [name for name, field in by_option.items() if field not in values]
            if not free:
                raise UserError(
                    f"{kind} '{choice.name}' takes {many(len(fields), 'option')}, '{show(value)}' is one too many"
                )
            key = free[0]
        if key not in by_option:
            if not fields:
                raise UserError(f"{kind} '{choice.name}' has no options, so '{key}' means nothing to it")
            raise unknown(f"option of {kind} '{choice.name}' called", key, list(by_option))
        if by_option[key] in values:
            raise UserError(f"{kind} '{choice.name}' got '{key}' twice")
        what = f"{key} of {kind} '{choice.name}'"
        values[by_option[key]] = convert(value, hints[by_option[key]], what)
        if kind == "method":  # which would say the same of itself, but does not know what it was called
            _check_range(next(f for f in fields if f.name == by_option[key]), values[by_option[key]], what)
    missing = [option(f) for f in fields if _required(f) and f.name not in values]
    if missing:
        raise UserError(f"{kind} '{choice.name}' needs {missing[0]}: write '{choice.name}:{missing[0]}=...'")
    return cls(**values)


def option(field: dataclasses.Field[Any]) -> str:
    """What a field is called in a text."""
    return field.name.removesuffix("_")


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def convert(value: Any, hint: Any, what: str) -> Any:
    """Turn a text or YAML value into the type of a field, or say what it should have been."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if type(None) in options and (value is None or str(value).lower() == "none"):
            return None
        rest = [o for o in options if o is not type(None)]
        for option in rest[:-1]:
            try:
                return convert(value, option, what)
            except UserError:
                continue
        return convert(value, rest[-1], what)
    if origin is Literal:
        allowed = typing.get_args(hint)
        for option in allowed:
            if str(value).lower() == str(option).lower():
                return option
        raise UserError(f"{what} must be one of {', '.join(map(str, allowed))}, not '{show(value)}'")
    if hint is bool:
        word = str(value).lower()
        if word in ("true", "yes", "on", "1", "false", "no", "off", "0"):
            return word in ("true", "yes", "on", "1")
        raise UserError(f"{what} must be true or false, not '{show(value)}'")
    if hint is int:
        return _whole(value, what)
    if hint is float:
        found = _float(value)
        if math.isnan(found):
            raise UserError(f"{what} must be a number, not '{show(value)}'")
        return found
    return str(value)


def _float(value: Any) -> float:
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _whole(value: Any, what: str) -> int:
    found: int | None = None
    if not isinstance(value, bool):
        try:
            found = int(str(value))  # not by way of a float, which cannot hold every whole number
        except ValueError:
            if _float(value).is_integer():
                found = int(_float(value))
    if found is None or abs(found) >= 2**63:  # what no array or tensor could hold
        raise UserError(f"{what} must be a whole number, not '{show(value)}'")
    return found


def number(default: Any, meaning: str = "", **limits: float) -> Any:
    """A dataclass field with a range: any of ``at_least``, ``above``, ``at_most`` and ``below``.

    ``meaning`` is what ``isofed methods NAME`` says about it.
    """
    return dataclasses.field(default=default, metadata={**limits, "meaning": meaning})


def described(default: Any, meaning: str) -> Any:
    """A dataclass field that is no number, with what ``isofed methods NAME`` says about it."""
    return dataclasses.field(default=default, metadata={"meaning": meaning})


def meaning_of(field: dataclasses.Field[Any]) -> str:
    """What an option is for, where its class says so."""
    return str(field.metadata.get("meaning", ""))


def values_of(cls: type, field: dataclasses.Field[Any]) -> str:
    """What an option may be, in words: its choices, or the limits of a number; nothing where any text will do."""
    hint = typing.get_type_hints(cls)[field.name]
    hints = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    words: list[str] = []
    for one in hints:
        if typing.get_origin(one) is Literal:
            words += map(str, typing.get_args(one))
        elif one is bool:
            words += ["true", "false"]
        elif one in (int, float):
            words.append(_limits(field) or ("a whole number" if one is int else "a number"))
        elif one is type(None):
            words.append("none")
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def _limits(field: dataclasses.Field[Any]) -> str:
    return " and ".join(f"{_SIGNS[k]} {v:g}" for k, v in field.metadata.items() if k in _SIGNS)


def check_ranges(thing: Any) -> None:
    """Refuse numbers outside the range of their field, and those that are not finite."""
    for field in dataclasses.fields(thing):
        _check_range(field, getattr(thing, field.name), f"{option(field)} of method '{type(thing).__name__.lower()}'")


def _check_range(field: dataclasses.Field[Any], value: Any, what: str) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    limits = field.metadata
    inside = (
        math.isfinite(value)
        and value >= limits.get("at_least", -math.inf)
        and value <= limits.get("at_most", math.inf)
        and not value <= limits.get("above", -math.inf)
        and not value >= limits.get("below", math.inf)
    )
    if not inside:
        raise UserError(f"{what} must be {_limits(field) or 'finite'}, not {show(value)}")


def describe(thing: Any, name: str, full: bool = False) -> Choice:
    """The choice that would make this dataclass again, with the options that differ from their defaults (or all)."""
    options = []
    for field in dataclasses.fields(thing):
        value = getattr(thing, field.name)
        if field.init and (full or _required(field) or value != field.default):
            options.append((option(field), value))
    return Choice(name, tuple(options))


def to_yaml(choices: tuple[Choice, ...]) -> list[Any]:
    """The list form for a YAML file."""
    return [{c.name: dict(c.options)} if c.options else c.name for c in choices]
