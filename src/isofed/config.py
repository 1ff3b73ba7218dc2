"""The settings of a run: one validated object, whether they come from the command line, a YAML file or Python."""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from isofed import spec
from isofed.data import Dataset, absolute, option_names
from isofed.data.augment import parse as parse_augment
from isofed.data.base import AS_DATASET
from isofed.data.partition import FromFile
from isofed.data.partition import option_names as split_options
from isofed.data.partition import parse as parse_partition
from isofed.errors import IsofedError, UserError, unknown
from isofed.methods import Composition
from isofed.methods import names as method_names
from isofed.methods import parse as parse_method
from isofed.models.base import norm_layer
from isofed.plugins import digest, digests, is_file_reference, resolve, shorten
from isofed.schedule import FORMS, factor_at
from isofed.words import kind_of
from isofed.yaml_text import BadYAML, read_yaml_text

OWN = "own"  # the norm of a network that is left as it is; 'none' is a network without any
HOW = frozenset({"executor", "workers", "slots", "actors", "device"})  # how a run is computed, not what it computes
_SETTING = re.compile(r"^[A-Za-z_][A-Za-z_0-9]*=")
_AUTO = ("clients", "local_epochs", "workers", "slots", "actors")  # where to leave it out is not to have none
_KINDS = {"float": "a number", "int": "a whole number", "bool": "true or false", "string": "a text"}  # of pydantic
_ELSEWHERE = {
    "seeds": "belongs to compare and tune; one run has one seed, as in seed=3",
    "methods": "belongs to compare; a run has one method, as in method=fedprox",
    "picture": "belongs to data, as in: isofed data digits picture=split.png",
}
_ALSO_CALLED = {  # elsewhere
    **{
        "learning_rate": "lr",
        "eta": "lr",
        "epochs": "local_epochs",
        "local_ep": "local_epochs",
        "steps": "local_steps",
    },
    **{"batch": "batch_size", "bs": "batch_size", "local_bs": "batch_size", "dataset": "data", "network": "model"},
    **{
        "algorithm": "method",
        "strategy": "method",
        "aggregation": "method",
        "optimizer": "method",
        "wd": "weight_decay",
    },
    **{
        "num_clients": "clients",
        "n_clients": "clients",
        "num_rounds": "rounds",
        "num_users": "clients",
        "gpu": "device",
    },
    **{"comm_round": "rounds", "fraction": "participation", "frac": "participation", "split": "partition"},
}


class Settings(BaseModel):
    """Every setting of a run, with its default and what it means."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, arbitrary_types_allowed=True
    )

    method: Any = Field("fedavg", description="methods joined by '+', such as fedprox:mu=0.01+fedbn")
    data: str = Field(
        "digits", description="a data set, such as digits or synthetic:samples=5000, or a path to your own"
    )
    root: str | None = Field(None, description="the folder or file that holds the data set, where it needs one")
    partition: str = Field(
        "dirichlet:0.1", description="iid, dirichlet:A, pathological:M, domain, quantity:A, from_file:F"
    )
    clients: int | None = Field(None, ge=1, description="number of clients; 10, or one per domain, if not given")
    participation: float = Field(1.0, gt=0, le=1, description="share of the clients that take part in a round")
    weighting: Literal["samples", "uniform"] = Field(
        "samples", description="how clients count in the mean: by their samples, or uniform"
    )
    rounds: int = Field(20, ge=1, description="communication rounds")
    local_epochs: int | None = Field(None, ge=1, description="passes over a client's data in a round; 5 if not given")
    local_steps: int | None = Field(None, ge=1, description="steps of a client in a round, instead of epochs")
    batch_size: int = Field(32, ge=1, description="samples in a local step")
    lr: float = Field(0.05, gt=0, description="local learning rate")
    lr_schedule: str = Field("constant", description=f"over rounds: {FORMS}, after rounds A and B or such shares")
    momentum: float = Field(0.9, ge=0, lt=1, description="of the local optimiser")
    nesterov: bool = Field(False, description="Nesterov's form of momentum")
    persistent_momentum: bool = Field(False, description="a client keeps its momentum from visit to visit")
    weight_decay: float = Field(0.0, ge=0, description="of the local optimiser")
    clip: float | None = Field(None, gt=0, description="largest norm of a gradient; longer ones are scaled down")
    last_batch: Literal["keep", "drop"] = Field("keep", description="keep or drop an epoch's last, smaller batch")
    augment: str = Field(
        "none",
        description="none, or crop:4, flip, rotation:15, resized_crop, jitter, autoaugment, joined by '+'",
    )
    validation: float = Field(0.0, ge=0, lt=1, description="share of the training part held out to judge rounds by")
    final_test: bool = Field(True, description="with a validation part: judge the final model on the test part, once")
    model: str = Field("cnn", description="a network, such as cnn or mlp, or path/to/file.py:build")
    norm: str = Field(OWN, description="own (what the network has), or batch, group:N or none instead")
    seed: int = Field(0, ge=0, description="of everything random in the run")
    device: str = Field("cpu", description="cpu, cuda, cuda:1")
    executor: Literal["auto", "serial", "workers", "slots", "ray"] = Field(
        "auto", description="how clients are trained: auto, serial, workers, slots or ray"
    )
    workers: int | None = Field(None, ge=1, description="worker processes; one per core if not given")
    slots: int | None = Field(None, ge=1, description="replicas on a GPU, side by side; as many as pay if not given")
    actors: int | None = Field(None, ge=1, description="Ray actors (executor=ray); one per GPU, or core, if not given")
    precision: Literal["fp32", "tf32", "bf16"] = Field("fp32", description="of local training: fp32, tf32 or bf16")
    deterministic: bool = Field(True, description="the same bits each time on the same machine, also on a GPU")
    evaluate_every: int = Field(1, ge=1, description="rounds between evaluations; the last round is always judged")
    train_loss: bool = Field(True, description="evaluations include the loss on the pooled training part")
    target: float | None = Field(None, gt=0, le=1, description="accuracy to count rounds to")
    stop_at_target: bool = Field(False, description="stop at the first evaluation that reaches the target")
    diagnose: str = Field("none", description="record spectra, alignment and drift during the run: every:N or none")
    track: Literal["none", "tensorboard"] = Field(
        "none", description="log to another tool as well: tensorboard or none"
    )
    keep: str = Field("none", description="store the global weights for later study: every:N or none")
    keep_clients: str = Field("none", description="store the clients' weights as well: last, every:N or none")

    @field_validator("method", mode="plain")
    @classmethod
    def _method(cls, value: Any) -> Composition:
        _check_joined(value)
        return parse_method(value)

    @field_validator("norm", mode="before")
    @classmethod
    def _norm(cls, value: Any) -> Any:
        return OWN if value is None else value

    @field_validator(*_AUTO, mode="before")
    @classmethod
    def _left_out(cls, value: Any) -> Any:
        return None if isinstance(value, str) and value.lower() in ("auto", "none") else value

    @field_validator("model")
    @classmethod
    def _model(cls, value: str) -> str:
        return resolve(value) if is_file_reference(value) else value

    @field_validator("data", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if isinstance(value, Dataset):
            raise UserError("data= names a data set; one that you have made is given as dataset=")
        if hasattr(value, "__getitem__") and not isinstance(value, str):
            raise UserError(f"data= names a data set or a path, it cannot be {kind_of(value)}: {AS_DATASET}")
        if isinstance(value, str) and not value.strip():  # which, as a path, would be this folder
            raise UserError("data= is empty: it must name a data set, such as digits, or the path of your own")
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator("data")
    @classmethod
    def _data(cls, value: str) -> str:
        return absolute(value)

    @field_validator("root")
    @classmethod
    def _root(cls, value: str | None) -> str | None:
        return None if value is None else os.path.abspath(os.path.expanduser(value))

    @field_validator("partition")
    @classmethod
    def _partition(cls, value: str) -> str:
        kind = parse_partition(value)
        if isinstance(kind, FromFile):
            return f"from_file:{os.path.abspath(os.path.expanduser(kind.path))}"
        return value

    @model_validator(mode="after")
    def _together(self) -> Settings:
        if self.local_epochs and self.local_steps:
            raise UserError("local_epochs and local_steps exclude each other; give one of them")
        if self.nesterov and not self.momentum:
            raise UserError("nesterov=true needs a momentum above 0")
        if not self.final_test and not self.validation:
            raise UserError("final_test=false needs a validation part to judge rounds by, such as validation=0.1")
        if self.stop_at_target and self.target is None:
            raise UserError("stop_at_target=true needs a target, such as target=0.9")
        if self.device == "cpu" and (self.executor == "slots" or self.slots is not None):
            raise UserError("slots are replicas on a GPU; use device=cuda, or executor=workers on the CPU")
        if self.slots is not None and self.executor not in ("auto", "slots", "ray"):
            raise UserError(f"slots={self.slots} goes with executor=slots, not with executor={self.executor}")
        if self.executor == "workers" and self.device != "cpu":
            raise UserError("executor=workers trains on the CPU; use executor=slots with device=" + self.device)
        if self.precision == "tf32" and self.device == "cpu":
            raise UserError("precision=tf32 is a mode of GPUs; use fp32 or bf16 on the CPU")
        lr_at(self, 1)
        parse_augment(self.augment)
        if self.norm != OWN:
            norm_layer(self.norm)
        keep_rule(self.keep, "keep")
        keep_rule(self.keep_clients, "keep_clients")
        keep_rule(self.diagnose, "diagnose")
        self.check_method()
        return self

    def check_method(self) -> None:
        """Let the method refuse these settings, with a sentence whatever it raises."""
        try:
            self.method.check(self)
        except IsofedError:
            raise
        except Exception as error:
            raise UserError(f"the method '{self.method.shown()}' refuses these settings: {error}") from error

    @property
    def epochs(self) -> int | None:
        """Local epochs, or nothing where steps are counted instead."""
        return None if self.local_steps else self.local_epochs or 5

    def files(self) -> dict[str, str]:
        """The user's own files that the run is made of, each with a digest."""
        kind = parse_partition(self.partition)
        # One that is gone has none, and is told of where it is read.
        split = [kind.path] if isinstance(kind, FromFile) and os.path.isfile(kind.path) else []
        return self.code() | {file: digest(file) for file in split}

    def code(self) -> dict[str, str]:
        """Those of them that every process has to run."""
        return digests([self.model, *(name for name, _ in self.method.parts)])

    def to_dict(self) -> dict[str, Any]:
        """Plain values that make these settings again, methods with every hyper-parameter spelled out."""
        return self.model_dump(exclude={"method"}) | {"method": self.method.to_yaml()}


def settings(values: Mapping[str, Any]) -> Settings:
    """Check all values and build the settings; what is wrong is one :class:`UserError`."""
    for key in values:
        if key not in Settings.model_fields:
            raise _strange(str(key), values)
        if isinstance(values[key], bool) and _is_number(key):
            raise UserError(f"{key}={show(key, values[key])} is not possible: it must be a number")
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        said = first.get("ctx", {}).get("error")
        if isinstance(said, UserError):
            raise said from None
        if not first["loc"]:
            raise UserError(f"the settings are not possible: {said or first['msg']}") from None
        key, problem = str(first["loc"][0]), first["msg"].removeprefix("Input ").removeprefix("Value error, ")
        kind = first["type"].split("_")[0]
        if first["type"] in (f"{kind}_parsing", f"{kind}_type", "int_from_float") and kind in _KINDS:
            problem = f"must be {_KINDS[kind]}"
        raise UserError(f"{key}={show(key, values.get(key))} is not possible: it {problem}") from None


def _strange(key: str, values: Mapping[str, Any]) -> UserError:
    """The error for a name that is no setting, with where it belongs."""
    if key in _ELSEWHERE:
        return UserError(f"{key}= {_ELSEWHERE[key]}")
    for part in parts_with(values.get("method"), key):
        text = f"method={part}:{key}={spec.show(values[key])}"
        return UserError(f"there is no setting '{key}'; as an option of {part} it is written {text}")
    for setting, choices in (("data", option_names), ("partition", split_options)):
        given = str(values.get(setting, ""))
        if key in choices(given):
            text = f"{setting}={given}{',' if ':' in given else ':'}{key}={spec.show(values[key])}"
            return UserError(f"there is no setting '{key}'; as an option of {setting} it is written {text}")
    known = [*Settings.model_fields, "out"]
    plain = key.strip().replace("-", "_").lower()
    if meant := plain if plain in known else _ALSO_CALLED.get(plain):
        return UserError(f"there is no setting '{key}': it is called {meant} here; `isofed settings` lists all")
    return unknown("setting", key, known)


def parts_with(method: Any, option: str) -> list[str]:
    """The parts of a method that have an option of this name; none of what is no method."""
    try:
        parts = parse_method(method).parts if method is not None else ()
    except IsofedError:
        return []
    return [shorten(name) for name, part in parts if option in map(spec.option, dataclasses.fields(part))]


def _check_joined(method: Any) -> None:
    """Methods with commas between them are a common slip."""
    names = method.split(",") if isinstance(method, str) and "," in method.split(":")[0] else []
    if len(names) > 1 and all(name.strip() in method_names() for name in names):
        names = [name.strip() for name in names]
        raise UserError(
            f"'{method}' is no method: join them with '+', as in {'+'.join(names)}, or, to set them side by side: "
            f"isofed compare {' '.join(names)}"
        )


def show(key: str, value: Any) -> str:
    """The value of a setting as it is typed; what was left out goes by the word that says so."""
    if value is None and key in (*_AUTO, "norm"):
        return OWN if key == "norm" else "auto"
    if key == "method" and isinstance(value, list):  # as a record holds it
        return "+".join(map(str, spec.parse(value, key)))
    return spec.show(value)


def in_todays_words(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a record holds them; where an earlier version wrote null for a network's own norm, by its name."""
    return {k: OWN if k == "norm" and v is None else v for k, v in recorded.items()}


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file, or in the ``config.yaml`` of a run folder."""
    file = Path(path)
    if os.path.isdir(file):
        file = file / "config.yaml"
    try:
        values = read_yaml_text(file.read_bytes())
    except OSError as error:
        raise UserError(f"the settings file {file} cannot be read: {error.strerror}") from None
    except BadYAML as error:
        raise UserError(f"the settings file {file} {error}") from None
    except ValueError:
        raise UserError(f"the settings file {str(file)!r} cannot be read: no file can have that name") from None
    if not isinstance(values, dict):
        raise UserError(f"the settings file {file} must hold 'key: value' lines")
    return {key: _none(key, value) for key, value in values.items()}


def is_setting(word: str) -> bool:
    """Whether a word of the command line is ``key=value`` (and not a method such as ``fedprox:mu=0.1``)."""
    return bool(_SETTING.match(word))


def read_words(words: Iterable[str]) -> dict[str, Any]:
    """Settings from ``key=value`` words and YAML files; later ones win."""
    values: dict[str, Any] = {}
    for word in words:
        if is_setting(word):
            key, _, text = word.partition("=")
            values[key] = _none(key, text)
        elif word.endswith((".yaml", ".yml")) or os.path.isdir(word):
            values |= read_yaml(word)
        else:
            raise UserError(f"'{word}' is neither a setting (key=value) nor a YAML file{_meant_by(word)}")
    return values


def _meant_by(word: str) -> str:
    """What a word of the command line that is no setting may be meant for."""
    if word.split(":")[0].split("+")[0] in method_names():
        return f"; did you mean method={word}?"
    name, equals, value = (part.strip() for part in word.partition("="))
    part, dot, option = name.partition(".")
    if equals and dot and part in method_names():
        return f"; did you mean method={part}:{option}={value}?"
    plain = name.replace("-", "_").lower()
    plain = _ALSO_CALLED.get(plain, plain)
    return f"; did you mean {plain}={value}?" if equals and plain in Settings.model_fields else ""


def _none(key: str, value: Any) -> Any:
    """A value as it is, or nothing where it says ``none`` for a setting that may have none."""
    field = Settings.model_fields.get(key)
    said = isinstance(value, str) and value.lower() in ("none", "null")
    return None if said and field is not None and field.default is None else value


def _is_number(key: str) -> bool:
    """Whether a setting is a number; pydantic takes ``true`` for 1."""
    kind = Settings.model_fields[key].annotation
    return bool({int, float} & {kind, *typing.get_args(kind)})


def lr_at(s: Settings, round: int) -> float:
    """The local learning rate of a round, counted from 1; it is constant within a round."""
    return s.lr * factor_at(s.lr_schedule, round, s.rounds)


def keep_rule(text: str, key: str) -> int | None:
    """How often something is stored: every n rounds, 0 for the last round only, or not at all."""
    choice = spec.parse_one(text, key)
    values = [v for k, v in choice.options if k in ("", "n")]
    if choice.name == "none" and not choice.options:
        return None
    if choice.name == "last" and not choice.options and key == "keep_clients":
        return 0
    if choice.name == "every" and len(values) == len(choice.options) == 1:
        number = str(values[0])
        if number.isdecimal() and int(number) > 0:
            return int(number)
    raise UserError(f"{key} must be none, {'last, ' if key == 'keep_clients' else ''}or every:N, not '{text}'")
