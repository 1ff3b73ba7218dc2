"""Where methods are found: the package, installed plug-ins, or a user's own file."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import sys
from importlib.metadata import EntryPoint, entry_points

from isofed.errors import UserError, unknown
from isofed.methods.base import Method
from isofed.plugins import check_file, is_file_reference, load_from_file, resolve

GROUP = "isofed.methods"  # the entry-point group of installed plug-ins: name = "package.module:Class"

_BUILT_IN = {
    "fedavg": "fedavg:FedAvg",
    "fedavgm": "fedavgm:FedAvgM",
    "fedadam": "fedopt:FedAdam",
    "fedyogi": "fedopt:FedYogi",
    "fedadagrad": "fedopt:FedAdagrad",
    "fedprox": "fedprox:FedProx",
    "fednova": "fednova:FedNova",
    "scaffold": "scaffold:Scaffold",
    "feddyn": "feddyn:FedDyn",
    "fedbn": "fedbn:FedBN",
    "central": "central:Central",
    "feduv": "feduv:FedUV",
    "univarfl": "univarfl:UniVarFL",
    "spherefed": "spherefed:SphereFed",
    "feddecorr": "feddecorr:FedDecorr",
    "fedalign": "fedalign:FedAlign",
    "gradaug": "gradaug:GradAug",
    "mixup": "mixup:Mixup",
    "stochdepth": "stochdepth:StochDepth",
    "moon": "moon:Moon",
    "freeze": "freeze:Freeze",
    "fedbabu": "freeze:FedBABU",
    "ffc": "ffc:FFC",
    "ccvr": "ccvr:CCVR",
    "oracle_head": "oracle_head:OracleHead",
    "decov": "decov:DeCov",
    "structured_decov": "decov:StructuredDeCov",
    "fedrs": "fedrs:FedRS",
    "fedlc": "fedlc:FedLC",
    "fedsam": "fedsam:FedSAM",
    "fedexp": "fedexp:FedExP",
    "median": "median:Median",
    "trimmed": "trimmed:Trimmed",
    "krum": "krum:Krum",
    "clip_update": "clip_update:ClipUpdate",
    "gaussian": "gaussian:Gaussian",
}


def names() -> tuple[str, ...]:
    """Every method that can be named, built in and installed."""
    return tuple(dict.fromkeys([*_BUILT_IN, *(e.name for e in _installed())]))


def _installed() -> tuple[EntryPoint, ...]:
    """The methods of installed packages."""
    return _found_on(tuple(sys.path))


@functools.lru_cache(maxsize=8)
def _found_on(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Looking through all packages takes longer than all else that is done with a method's text."""
    return tuple(entry_points(group=GROUP))


def name_of(cls: type[Method]) -> str:
    """What a class of methods is called in a text."""
    for name, place in _BUILT_IN.items():
        if f"isofed.methods.{place}" == f"{cls.__module__}:{cls.__name__}":
            return name
    return cls.__name__.lower()


def find(name: str) -> tuple[str, type[Method]]:
    """The method's canonical name and its class."""
    if is_file_reference(name):
        return resolve(name), check_class(name, load_from_file(name, "method", _is_method))
    if name.lower() in _BUILT_IN:
        module, cls = _BUILT_IN[name.lower()].split(":")
        return name.lower(), getattr(importlib.import_module(f"isofed.methods.{module}"), cls)
    for entry in (e for e in _installed() if e.name == name):
        try:
            loaded = entry.load()
        except Exception as error:
            raise UserError(f"the plug-in method '{name}' ({entry.value}) could not be loaded: {error}") from error
        return name, check_class(name, loaded)
    check_file(name, "method")
    raise unknown("method", name, names())


def is_ours(cls: type[Method]) -> bool:
    """Whether a class of methods is of this package, and not somebody's own."""
    return cls.__module__.startswith("isofed.methods.")


def _is_method(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, Method)


def check_class(name: str, cls: object) -> type[Method]:
    """Refuse what cannot be a method, or would quietly be none; ``name`` is what a message calls it."""
    if isinstance(cls, type) and issubclass(cls, Method) and is_ours(cls):
        return cls  # of which some do nothing on purpose
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise UserError(f"'{name}' is not a method: it must be a class derived from isofed.Method")
    # Without its own @dataclass a subclass would silently lose its fields.
    own = {f for f in vars(cls).get("__annotations__", {}) if "ClassVar" not in str(cls.__annotations__[f])}
    if own and "__dataclass_fields__" not in vars(cls):
        raise UserError(f"'{name}' has options ({', '.join(sorted(own))}) but lacks @dataclass(frozen=True) above it")
    assert dataclasses.is_dataclass(cls)
    _check_acts(name, cls)
    for field in dataclasses.fields(cls):
        if hasattr(Method, field.name):
            hint = f"call the field '{field.name}_', and a text can still say {field.name}="
            raise UserError(f"'{name}' has an option called '{field.name}', which is a place of a round; {hint}")
    return cls


def _check_acts(name: str, cls: type[Method]) -> None:
    """A misspelt hook would never be called, and the method would quietly do less than it says, or nothing."""
    hooks = [n for n in vars(Method) if not n.startswith("_")]
    idle = [hook for hook in hooks if getattr(cls, hook) is getattr(Method, hook)]
    own = [base for base in cls.__mro__ if issubclass(base, Method) and not is_ours(base)]
    written = [n for base in own for n, v in vars(base).items() if callable(v) and not n.startswith("_")]
    strange = [n for n in dict.fromkeys(written) if n not in hooks]
    acts = len(idle) < len(hooks)
    for function in strange:
        near = difflib.get_close_matches(function, idle, n=1, cutoff=0.75 if acts else 0.6)
        if near:
            helper = f" or, for a helper of your own, '_{function}'" if acts else ""
            raise UserError(f"'{name}' has a '{function}' that nothing calls: did you mean '{near[0]}'{helper}?")
    if not acts:
        raise UserError(f"'{name}' acts at no place of a round, so it would do nothing")
