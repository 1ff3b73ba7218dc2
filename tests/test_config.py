"""Settings: one object from words, YAML or Python, and one sentence for every mistake."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as quickly
from hypothesis import strategies as st

from isofed.config import Settings, is_setting, keep_rule, lr_at, read_words, read_yaml, settings
from isofed.errors import UserError


def said(**values: Any) -> str:
    with pytest.raises(UserError) as caught:
        settings(values)
    text = str(caught.value)
    assert "\n" not in text and "pydantic" not in text.lower() and len(text) < 600
    return text


def test_defaults_are_valid_and_whole() -> None:
    made = settings({})
    assert str(made.method) == "fedavg"
    assert (made.epochs, made.clients, made.local_steps) == (5, None, None)
    assert all(field.description for field in Settings.model_fields.values())


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"learning_rate": 1}, "there is no setting 'learning_rate'"),
        ({"lrs": 1}, "there is no setting 'lrs': did you mean 'lr'?"),
        ({"round": 3}, "did you mean 'rounds'?"),
        ({"lr": 0}, "lr=0 is not possible: it should be greater than 0"),
        ({"lr": -1}, "lr=-1 is not possible"),
        ({"lr": "fast"}, "lr=fast is not possible: it must be a number"),
        ({"lr": None}, "lr=none is not possible"),
        ({"lr": "nan"}, "lr=nan is not possible"),
        ({"lr": math.nan}, "lr=nan is not possible"),
        ({"lr": "inf"}, "lr=inf is not possible"),
        ({"weight_decay": math.inf}, "weight_decay=inf is not possible"),
        ({"clip": 0}, "clip=0 is not possible"),
        ({"rounds": 0}, "rounds=0 is not possible: it should be greater than or equal to 1"),
        ({"rounds": 1.5}, "rounds=1.5 is not possible: it must be a whole number"),
        ({"rounds": "many"}, "rounds=many is not possible: it must be a whole number"),
        ({"clients": 0}, "clients=0 is not possible"),
        ({"participation": 0}, "participation=0 is not possible"),
        ({"participation": 1.1}, "participation=1.1 is not possible: it should be less than or equal to 1"),
        ({"weighting": "sample"}, "weighting=sample is not possible: it should be 'samples' or 'uniform'"),
        ({"local_epochs": 0}, "local_epochs=0 is not possible"),
        ({"local_epochs": 2, "local_steps": 3}, "local_epochs and local_steps exclude each other"),
        ({"batch_size": 0}, "batch_size=0 is not possible"),
        ({"momentum": 1}, "momentum=1 is not possible: it should be less than 1"),
        ({"momentum": -0.1}, "momentum=-0.1 is not possible"),
        ({"nesterov": True, "momentum": 0}, "nesterov=true needs a momentum above 0"),
        ({"nesterov": "perhaps"}, "nesterov=perhaps is not possible: it must be true or false"),
        ({"last_batch": "pad"}, "last_batch=pad is not possible: it should be 'keep' or 'drop'"),
        ({"validation": 1}, "validation=1 is not possible"),
        ({"validation": -0.1}, "validation=-0.1 is not possible"),
        ({"seed": -1}, "seed=-1 is not possible"),
        ({"executor": "threads"}, "executor=threads is not possible"),
        ({"executor": "workers", "device": "cuda"}, "executor=workers trains on the CPU"),
        ({"workers": 0}, "workers=0 is not possible"),
        ({"precision": "fp16"}, "precision=fp16 is not possible: it should be 'fp32', 'tf32' or 'bf16'"),
        ({"evaluate_every": 0}, "evaluate_every=0 is not possible"),
        ({"target": 1.5}, "target=1.5 is not possible"),
        ({"stop_at_target": True}, "stop_at_target=true needs a target, such as target=0.9"),
        ({"lr_schedule": "linear"}, "lr_schedule must be constant, cosine, step:every=N,factor=F or step:at=A/B"),
        ({"lr_schedule": "step"}, "lr_schedule must be"),
        ({"lr_schedule": "step:every=0,factor=0.5"}, "lr_schedule must be"),
        ({"lr_schedule": "step:every=2,factor=0"}, "lr_schedule must be"),
        ({"lr_schedule": "step:every=2.5,factor=0.1"}, "every of lr_schedule must be a whole number, not '2.5'"),
        ({"lr_schedule": "step:every=2,factor=x"}, "factor of lr_schedule must be a number, not 'x'"),
        ({"lr_schedule": "step:every=2,factor=0.5,more=1"}, "lr_schedule must be"),
        ({"lr_schedule": "step:every=2,factor=0.5,every=3"}, "lr_schedule"),
        ({"lr_schedule": "cosine:1"}, "lr_schedule must be"),
        ({"lr_schedule": "step:at=0.5,every=2,factor=0.5"}, "lr_schedule must be"),
        ({"lr_schedule": "step:at=0.5/x,factor=0.5"}, "at of lr_schedule must be a number, not 'x'"),
        ({"lr_schedule": "step:at=0,factor=0.5"}, "at of lr_schedule must be rounds, or shares of them like 0.5/0.75"),
        ({"lr_schedule": "step:at=2.5,factor=0.5"}, "at of lr_schedule must be rounds, or shares of them"),
        ({"lr_schedule": "step:at=inf,factor=0.5"}, "at of lr_schedule must be"),
        ({"lr_schedule": "constant+cosine"}, "the lr_schedule takes one choice, not 2"),
        ({"lr_schedule": ""}, "lr_schedule"),
        ({"keep": "last"}, "keep must be none, or every:N, not 'last'"),
        ({"keep": "every"}, "keep must be none, or every:N, not 'every'"),
        ({"keep": "every:0"}, "keep must be"),
        ({"keep": "every:x"}, "keep must be"),
        ({"keep": "every:-1"}, "keep must be"),
        ({"keep": "every:3,x=4"}, "keep must be"),
        ({"keep": "every:²"}, "keep must be"),
        ({"keep_clients": "first"}, "keep_clients must be none, last, or every:N, not 'first'"),
        ({"method": "fedprx"}, "there is no method 'fedprx': did you mean 'fedprox'?"),
        ({"method": 3}, "the method must be a text like 'name:key=value' or a list of such, not 3"),
        ({"method": "fedprox:mu=x"}, "mu of method 'fedprox' must be a number"),
        ({"method": "scaffold", "persistent_momentum": True}, "'scaffold' measures progress from a momentum of zero"),
        ({"data": 5}, "data=5 is not possible: it must be a text"),
        ({"partition": "dirichlet"}, "partition 'dirichlet' needs alpha"),
        ({"partition": "dirichlett:1"}, "there is no partition 'dirichlett': did you mean 'dirichlet'?"),
        ({"augment": "flop"}, "there is no augmentation 'flop'"),
        ({"norm": "layer"}, "norm must be 'batch', 'group:N' (N groups) or 'none', not 'layer'"),
        ({"norm": "group"}, "norm must be"),
    ],
    ids=str,
)  # fmt: skip
def test_every_mistake_is_one_sentence(values: dict[str, Any], wanted: str) -> None:
    assert wanted in said(**values)


def test_a_methods_own_check_may_raise_what_it_likes() -> None:
    # A plug-in's check that raises a plain ValueError is still one sentence.
    from isofed.methods import Method

    class Picky(Method):
        def check(self, settings: Any) -> None:
            raise ValueError("only on Sundays")

    assert "only on Sundays" in said(method=Picky())


def test_texts_become_values() -> None:
    made = settings(
        {
            "lr": "1e-3",
            "rounds": "7",
            "nesterov": "true",
            "train_loss": "no",
            "clients": "3",
            "clip": "2.5",
            "seed": "4",
        }
    )
    assert (made.lr, made.rounds, made.nesterov, made.train_loss) == (1e-3, 7, True, False)
    assert (made.clients, made.clip, made.seed) == (3, 2.5, 4)


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(Exception, match="frozen"):
        settings({}).lr = 1.0


# Round trips


@quickly(max_examples=60, deadline=None)
@given(
    lr=st.floats(1e-8, 1e3),
    momentum=st.floats(0.01, 0.99),
    mu=st.floats(0, 1e6),
    clients=st.none() | st.integers(1, 1000),
    steps=st.none() | st.integers(1, 100),
    clip=st.none() | st.floats(1e-3, 1e3),
    target=st.none() | st.floats(0.01, 1),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    keep=st.sampled_from(["none", "every:3"]),
    norm=st.sampled_from([None, "batch", "none", "group:2"]),
)
def test_to_dict_makes_the_same_settings_again(
    lr: float,
    momentum: float,
    mu: float,
    clients: int | None,
    steps: int | None,
    clip: float | None,
    target: float | None,
    flags: tuple[bool, bool, bool],
    keep: str,
    norm: str | None,
) -> None:
    made = settings(
        {
            "lr": lr, "momentum": momentum, "method": f"fedprox:mu={mu!r}+fedavgm:damped=true", "clients": clients,
            "local_steps": steps, "clip": clip, "target": target, "nesterov": flags[0], "train_loss": flags[1],
            "deterministic": flags[2], "keep": keep, "keep_clients": "last", "norm": norm,
            "lr_schedule": "step:every=3,factor=0.5",
        }
    )  # fmt: skip
    plain = made.to_dict()
    assert settings(plain).to_dict() == plain
    assert settings(yaml.safe_load(yaml.safe_dump(plain))).to_dict() == plain
    assert settings(plain).method.parts == made.method.parts
    assert plain["method"] == [
        {"fedprox": {"mu": mu}},
        {"fedavgm": {"momentum": 0.9, "damped": True, "lr": 1.0}},
    ]


def test_a_file_says_none_as_words_do(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("clip: none\ntarget: None\nlocal_steps: none\nroot: none\nworkers: auto\naugment: none\n")
    made = settings(read_yaml(file))
    assert (made.clip, made.target, made.local_steps, made.root, made.workers) == (None,) * 5 and made.augment == "none"


@pytest.mark.parametrize("key", ["lr", "clients", "rounds", "clip", "participation"])
@pytest.mark.parametrize("value", [True, False])
def test_a_number_is_not_true_or_false(key: str, value: bool) -> None:
    """YAML takes yes for true, and 1 may come of that."""
    with pytest.raises(UserError, match=f"{key}={str(value).lower()} is not possible: it must be a number"):
        settings({key: value})


def test_words_yaml_and_python_agree(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("method:\n  - fedprox: {mu: 0.1}\n  - fedbn\nlr: 0.2\nclients: 4\nclip: null\n")
    python = settings({"method": "fedprox:mu=0.1+fedbn", "lr": 0.2, "clients": 4})
    assert settings(read_yaml(file)).to_dict() == python.to_dict()
    words = ["method=fedprox:mu=0.1+fedbn", "lr=0.2", "clients=4", "clip=none"]
    assert settings(read_words(words)).to_dict() == python.to_dict()
    (tmp_path / "config.yaml").write_text(file.read_text())
    assert settings(read_words([str(tmp_path)])).to_dict() == python.to_dict()
    assert settings(read_words([str(file), "lr=0.3", "lr=0.4"])).lr == 0.4  # later ones win
    assert settings(read_words(["lr=0.4", str(file)])).lr == 0.2


@pytest.mark.parametrize("word", ["clients=none", "clients=None", "clip=null", "root=none", "target=none"])
def test_none_means_not_given(word: str) -> None:
    key = word.partition("=")[0]
    assert read_words([word]) == {key: None}
    assert getattr(settings(read_words([word])), key) is None


def test_norm_none_on_the_command_line_means_no_norm() -> None:
    # "batch, group:N or none": here none is a value, and not the absence of one.
    assert settings(read_words(["norm=none"])).norm == "none"
    assert settings(read_words(["keep=none", "augment=none"])).keep == "none"


@pytest.mark.parametrize(
    ("word", "yes"),
    [("lr=1", True), ("fedprox:mu=0.1", False), ("fedprox", False), ("a_b=", True), ("my.yaml", False), ("=3", False),
     ("method=fedprox:mu=0.1", True)],
)  # fmt: skip
def test_words_that_are_settings(word: str, yes: bool) -> None:
    assert is_setting(word) == yes


def test_bad_words_and_files(tmp_path: Path) -> None:
    def wrong(*words: str) -> str:
        with pytest.raises(UserError) as caught:
            read_words(words)
        return str(caught.value)

    assert "'lr' is neither a setting (key=value) nor a YAML file" in wrong("lr")
    assert "cannot be read: No such file" in wrong(str(tmp_path / "none.yaml"))
    assert "config.yaml cannot be read" in wrong(str(tmp_path))
    (tmp_path / "bad.yaml").write_text("a: [1\nb: 2\n")
    assert "is not valid YAML (line" in wrong(str(tmp_path / "bad.yaml"))
    (tmp_path / "twice.yaml").write_text("lr: 0.1\nrounds: 2\nlr: 0.2\n")
    assert "twice.yaml has 'lr' twice (the second in line 3); keep one" in wrong(str(tmp_path / "twice.yaml"))
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert "must hold 'key: value' lines" in wrong(str(tmp_path / "list.yaml"))
    (tmp_path / "empty.yaml").write_text("")
    assert "must hold 'key: value' lines" in wrong(str(tmp_path / "empty.yaml"))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is not valid YAML" in wrong(str(tmp_path / "bytes.yaml"))
    (tmp_path / "tag.yaml").write_text("lr: !!python/object/apply:os.getcwd []\n")
    assert "is not valid YAML" in wrong(str(tmp_path / "tag.yaml"))
    (tmp_path / "key.yaml").write_text("3: 4\n")
    with pytest.raises(UserError, match="there is no setting '3'"):
        settings(read_yaml(tmp_path / "key.yaml"))


def test_yaml_numbers_with_exponents_are_numbers(tmp_path: Path) -> None:
    # YAML 1.1 reads 1e-3 as a text.
    (tmp_path / "a.yaml").write_text("lr: 1e-3\nweight_decay: 5e-4\nmethod: [{fedprox: {mu: 1e-2}}]\n")
    made = settings(read_yaml(tmp_path / "a.yaml"))
    assert (made.lr, made.weight_decay) == (1e-3, 5e-4)
    assert str(made.method) == "fedprox"


def test_a_models_file_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert settings({"model": "nets.py:build"}).model == f"{tmp_path.resolve()}/nets.py:build"
    assert settings({"model": "cnn"}).model == "cnn"


def test_paths_to_data_become_absolute_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A run folder's config.yaml repeats the run from any folder, so it cannot hold relative paths.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "split.json").write_text("[[0]]")
    (tmp_path / "mine.npz").write_bytes(b"")
    made = settings({"data": "mine.npz", "partition": "from_file:split.json"}).to_dict()
    assert Path(made["data"]).is_absolute()
    assert Path(made["partition"].removeprefix("from_file:")).is_absolute()
    assert Path(settings({"data": "npz", "root": "mine.npz"}).to_dict()["root"]).is_absolute()


# Schedules


def test_constant_and_cosine() -> None:
    constant, cosine = settings({"lr": 0.3}), settings({"lr": 0.3, "lr_schedule": "cosine", "rounds": 10})
    for t in range(1, 11):
        assert lr_at(constant, t) == 0.3
        assert lr_at(cosine, t) == pytest.approx(0.15 * (1 + math.cos(math.pi * (t - 1) / 10)), rel=1e-15)
    assert lr_at(cosine, 1) == 0.3
    assert lr_at(cosine, 10) > 0


def test_steps() -> None:
    made = settings({"lr": 1.0, "lr_schedule": "step:every=3,factor=0.1", "rounds": 10})
    assert [round(lr_at(made, t), 10) for t in range(1, 11)] == [1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.001]


@pytest.mark.parametrize(
    ("at", "rounds", "drops"),
    [("0.5/0.75", 8, (4, 6)), ("0.5/0.75", 10, (5, 8)), ("5", 10, (5, 99)), ("3/7", 10, (3, 7)), ("7/0.3", 10, (3, 7))],
)
def test_steps_at_rounds_or_shares_of_them(at: str, rounds: int, drops: tuple[int, int]) -> None:
    """FedBABU's: a tenth after one half of the rounds, and again after three quarters."""
    made = settings({"lr": 1.0, "lr_schedule": f"step:at={at},factor=0.1", "rounds": rounds})
    wanted = [0.1 ** ((done >= drops[0]) + (done >= drops[1])) for done in range(rounds)]
    assert [lr_at(made, t) for t in range(1, rounds + 1)] == pytest.approx(wanted, rel=1e-12)


def test_a_share_of_the_rounds_is_reckoned_as_it_is_written() -> None:
    """In floating point 0.55 of 100 is more than 55, and the rate would drop a round late."""
    for rounds in (8, 25, 50, 100, 200):
        for share in range(1, 100):
            made = settings({"lr": 1.0, "lr_schedule": f"step:at=0.{share:02d},factor=0.1", "rounds": rounds})
            after = next((done for done in range(rounds) if lr_at(made, done + 1) < 1), rounds)
            assert after == -(-share * rounds // 100), (share, rounds)


@pytest.mark.parametrize(
    ("text", "key", "rule"),
    [("none", "keep", None), ("every:5", "keep", 5), ("every:n=5", "keep", 5), ("every:1", "keep_clients", 1),
     ("last", "keep_clients", 0), ("none", "keep_clients", None)],
)  # fmt: skip
def test_keep_rule(text: str, key: str, rule: int | None) -> None:
    assert keep_rule(text, key) == rule


def test_epochs_or_steps() -> None:
    assert settings({"local_epochs": 2}).epochs == 2
    assert settings({"local_steps": 2}).epochs is None
    assert settings({}).epochs == 5
