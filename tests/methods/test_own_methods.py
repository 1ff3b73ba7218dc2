"""Methods of one's own: in files, in installed plug-ins, and in classes of this session."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isofed.errors import UserError
from isofed.layout import Policy, Tensors
from isofed.methods import Method, Step, names, parse
from isofed.methods.base import Round, Run, Visit
from isofed.methods.compose import portable
from isofed.methods.fedprox import FedProx
from tests.engine.plain import distance, small

# In files


MINE = '''
    from __future__ import annotations
    from dataclasses import dataclass
    from typing import ClassVar
    from isofed import Method

    @dataclass(frozen=True)
    class Mine(Method):
        """A pull."""

        strength: float = 0.5
        kind: str = "soft"
        owns: ClassVar[frozenset[str]] = frozenset()

        def gradient(self, step):
            step.grad.add_(step.weights - step.start, alpha=self.strength)

    @dataclass(frozen=True)
    class Other(Method):
        pass

    class Plain(Method):
        """No options, so no decorator is needed."""

    class Forgot(Method):
        strength: float = 0.5

    class NoMethod:
        pass

    number = 3
'''


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(textwrap.dedent(MINE))
    return f"{tmp_path}/mine.py"


def test_a_method_from_a_file(mine: str) -> None:
    composition = parse(f"fedavgm+{mine}:Mine:strength=0.25,kind=hard+fedbn")
    assert [n for n, _ in composition.parts] == ["fedavgm", f"{mine}:Mine", "fedbn"]
    made: Any = composition.parts[1][1]
    assert (made.strength, made.kind) == (0.25, "hard")
    assert parse(str(composition)).parts == composition.parts
    assert parse(composition.to_yaml()).parts == composition.parts
    assert parse(f"{mine}:Mine:0.25").parts[0][1] == parse([{f"{mine}:Mine": {"strength": 0.25}}]).parts[0][1]


def test_a_relative_path_becomes_absolute(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(mine).parent)
    composition = parse("mine.py:Mine")
    assert composition.to_yaml() == [{f"{Path(mine).resolve()}:Mine": {"strength": 0.5, "kind": "soft"}}]
    assert composition.shown() == "mine.py:Mine"  # as a person would type it here
    assert str(composition) == f"{Path(mine).resolve()}:Mine"  # as a record must hold it
    assert parse(str(composition)).parts == composition.parts
    with pytest.raises(UserError, match="appears twice"):
        parse(f"mine.py:Mine+{mine}:Mine")


def test_a_method_from_a_file_trains(mine: str) -> None:
    own, built_in = small(method=f"{mine}:Mine:strength=0.3"), small(method="fedprox:mu=0.3")
    assert distance(own.fit().weights, built_in.fit().weights) == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Minee", "called 'Minee': did you mean 'Mine'"),
        ("NoMethod", "is not a method: it must be a class derived from isofed.Method"),
        ("number", "is not a method"),
        ("Forgot", "has options (strength) but lacks @dataclass(frozen=True) above it"),
        ("Mine:strenght=1", "called 'strenght': did you mean 'strength'"),
    ],
)
def test_mistakes_in_files(mine: str, name: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(f"{mine}:{name}")
    assert said in str(caught.value)


def test_a_file_that_fails_says_so(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import isofed\nraise KeyError('oops')\n")
    with pytest.raises(UserError, match=r"could not be run: KeyError: 'oops' \(broken.py, line 2\)"):
        parse(f"{tmp_path}/broken.py:Mine")
    (tmp_path / "broken.py").write_text(
        "import dataclasses\nimport isofed\n@dataclasses.dataclass\nclass Mine(isofed.Method):\n    a: float = 1\n"
    )
    with pytest.raises(UserError, match=r"write @dataclass\(frozen=True\) above it \(broken.py, line 3\)"):
        parse(f"{tmp_path}/broken.py:Mine")
    (tmp_path / "broken.py").write_text("def def\n")
    with pytest.raises(UserError, match="could not be run: SyntaxError"):
        parse(f"{tmp_path}/broken.py:Mine")


def test_an_owner_must_be_known_and_a_hook_must_have_its_owner(tmp_path: Path) -> None:
    # combine and base are only called for their owner: without `owns` they would be silently left out.
    (tmp_path / "quiet.py").write_text(
        textwrap.dedent("""
            from dataclasses import dataclass
            from isofed import Method

            @dataclass(frozen=True)
            class Median(Method):
                def combine(self, updates, weights):
                    return updates.median(0).values

            @dataclass(frozen=True)
            class Loss(Method):
                def base(self, step):
                    return step.logits.square().mean()

            @dataclass(frozen=True)
            class Typo(Method):
                owns = frozenset({"combination"})
        """)
    )
    for name in ("Median", "Loss", "Typo"):
        with pytest.raises(UserError, match="owns"):
            parse(f"{tmp_path}/quiet.py:{name}")


def test_an_option_cannot_be_called_like_a_place(tmp_path: Path) -> None:
    (tmp_path / "clash.py").write_text(
        "from dataclasses import dataclass\nfrom isofed import Method\n\n\n"
        "@dataclass(frozen=True)\nclass Clash(Method):\n    share: float = 0.5\n"
    )
    with pytest.raises(UserError, match="option called 'share', which is a place of a round"):
        parse(f"{tmp_path}/clash.py:Clash")


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        ("los", "has a 'los' that nothing calls: did you mean 'loss'?"),
        ("helper", "acts at no place of a round, so it would do nothing"),
        ("loss agregate", "did you mean 'aggregate' or, for a helper of your own, '_agregate'?"),
        ("loss gradients", "has a 'gradients' that nothing calls: did you mean 'gradient' or"),
    ],
)
def test_a_misspelt_place_is_refused_with_the_one_that_was_meant(tmp_path: Path, functions: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        parse(own_method(tmp_path, functions))
    assert said in str(refused.value)


@pytest.mark.parametrize("functions", ["loss losses", "loss _los", "loss temperature", "loss gradient gradients"])
def test_helpers_of_ones_own_may_stand_beside_places(tmp_path: Path, functions: str) -> None:
    assert parse(own_method(tmp_path, functions))


def own_method(folder: Path, functions: str) -> str:
    """A file with a method that has these functions."""
    head = "from dataclasses import dataclass\nfrom isofed import Method\n\n\n"
    head += "@dataclass(frozen=True)\nclass Own(Method):\n"
    body = "".join(f"    def {name}(self, step):\n        return step.logits.mean()\n\n" for name in functions.split())
    (folder / "own.py").write_text(head + body)
    return f"{folder}/own.py:Own"


# Installed plug-ins


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real distribution on the path: a package and the metadata that pip would have written."""
    site = tmp_path / "site"
    package, info = site / "tiny_plugin", site / "tiny_plugin-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text(textwrap.dedent(MINE))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-plugin\nVersion: 1.0\n")
    (info / "RECORD").write_text("")
    (info / "entry_points.txt").write_text(
        "[isofed.methods]\ntinymine = tiny_plugin:Mine\ntinywrong = tiny_plugin:NoMethod\n"
        "tinygone = tiny_plugin:Nothing\ntinyforgot = tiny_plugin:Forgot\n"
    )
    monkeypatch.syspath_prepend(site)
    yield site
    sys.modules.pop("tiny_plugin", None)


def test_an_installed_plugin_is_a_method_like_any_other(plugin: Path) -> None:
    assert "tinymine" in names()
    composition = parse("fedavgm+tinymine:strength=0.3")
    assert str(composition) == "fedavgm+tinymine:strength=0.3"
    assert type(composition.parts[1][1]).__module__ == "tiny_plugin"
    assert portable(composition)
    run, other = small(method="tinymine:strength=0.3"), small(method="fedprox:mu=0.3")
    assert distance(run.fit().weights, other.fit().weights) == 0
    with pytest.raises(UserError, match="there is no method 'tinymin': did you mean 'tinymine'"):
        parse("tinymin")


def test_broken_plugins_say_so(plugin: Path) -> None:
    with pytest.raises(UserError, match="'tinywrong' is not a method"):
        parse("tinywrong")
    with pytest.raises(UserError, match="the plug-in method 'tinygone' .* could not be loaded"):
        parse("tinygone")
    with pytest.raises(UserError, match="lacks @dataclass"):
        parse("tinyforgot")


def test_without_the_plugin_its_name_is_unknown() -> None:
    with pytest.raises(UserError, match="there is no method 'tinymine'"):
        parse("tinymine")


def test_a_plugin_works_in_worker_processes(plugin: Path) -> None:
    run = small(method="tinymine:strength=0.3", executor="workers", workers=1)
    other = small(method="fedprox:mu=0.3")
    assert distance(run.fit().weights, other.fit().weights) == 0


# What a class of this session can and cannot do


@dataclasses.dataclass(frozen=True)
class Session(Method):
    """Defined here, so no other process can import it."""

    mu: float = 0.0

    def gradient(self, step: Step) -> None:
        step.grad.mul_(1 - self.mu)


def test_portable(mine: str) -> None:
    assert portable(parse("fedprox+fedbn"))
    assert portable(parse([FedProx(), "fedbn"]))
    assert portable(parse(f"{mine}:Mine"))
    assert not portable(parse(Session()))
    assert not portable(parse([FedProx(), Session()]))


def test_a_session_class_runs_serially_and_is_refused_by_workers() -> None:
    assert small(method=Session(), rounds=1).fit().method == "session"
    small(method=Session(), rounds=1, executor="auto", workers=2).fit()  # takes serial by itself
    with pytest.raises(UserError, match="is a class of this session, which a worker process cannot import"):
        small(method=Session(), rounds=1, executor="workers").fit()


@dataclasses.dataclass(frozen=True)
class HeadOnly(Method):
    """What clients tell about each tensor by name decides, by name, what the server takes over."""

    def client_state(self, run: Run) -> Tensors:
        return {"head_only.told": run.zeros()}

    def end(self, visit: Visit) -> None:
        for name, tensor in visit.named(visit.state["head_only.told"]).items():
            tensor.fill_(name.startswith("head."))
        assert visit.named(visit.weights)["head.weight"].shape == (4, 64)
        visit.mean["head_only.told"] = visit.state["head_only.told"]

    def aggregate(self, round: Round) -> None:
        told = round.named(round.mean["head_only.told"])
        for name, tensor in round.named(round.update).items():
            tensor.mul_(told[name])


@pytest.mark.parametrize("others", [[], ["fedbn"]])  # with fedbn, what travels is less than what is trained
def test_clients_and_the_server_see_tensors_by_name(others: list[str]) -> None:
    run = small(method=[*others, HeadOnly()], model="cnn", data="synthetic:samples=80,test=20,classes=4")
    before = run.layout.views(run.state.weights.clone())
    run.fit()
    after = run.layout.views(run.state.weights)
    shared = [e.name for e in run.layout.entries if e.trained and e.policy is Policy.SHARED]
    assert {name for name in shared if not after[name].equal(before[name])} == {"head.weight", "head.bias"}
