"""What a person can get wrong in a command: one sentence before any work, and the right exit code."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.cli_tools import SMALL, complaint, config, everything, isofed, plain, succeeds

MISTAKES = [
    # settings
    ("lrr=0.1", r"no setting 'lrr'.*did you mean 'lr'"),
    ("learning_rate=0.1", r"no setting 'learning_rate'"),
    ("lr=abc", r"lr=abc.*number"),
    ("lr=0", r"lr=0 .*greater than 0"),
    ("lr=-1", r"lr=-1 .*greater than 0"),
    ("lr=nan", r"lr=nan"),
    ("lr=inf", r"lr=inf"),
    ("weight_decay=inf", r"weight_decay=inf"),
    ("rounds=2.5", r"rounds=2.5.*must be a whole number"),
    ("rounds=0", r"rounds=0.*greater than or equal to 1"),
    ("clients=0", r"clients=0"),
    ("clients=-3", r"clients=-3"),
    ("seed=-1", r"seed=-1"),
    ("batch_size=100000 last_batch=drop", r"no client has a batch of 100000 samples.*none would take a step"),
    ("partition=mine.json", r"a split of your own is written partition=from_file:mine\.json"),
    ("nesterov=maybe", r"nesterov=maybe.*must be true or false"),
    ("momentum=1", r"momentum=1.*less than 1"),
    ("participation=0", r"participation=0"),
    ("participation=1.5", r"participation=1.5"),
    ("validation=1", r"validation=1"),
    ("target=0", r"target=0"),
    ("weighting=equal", r"weighting=equal.*'samples' or 'uniform'"),
    ("executor=threads", r"executor=threads.*'serial'"),
    ("executor=slots", r"slots are replicas on a GPU; use device=cuda"),
    ("slots=4", r"slots are replicas on a GPU; use device=cuda"),
    ("precision=fp8", r"precision=fp8"),
    ("device=tpu", r"device=tpu|no device 'tpu'"),
    ("lr_schedule=warmup", r"lr_schedule must be constant, cosine, step"),
    ("lr_schedule=step:every=0,factor=0.1", r"lr_schedule must be"),
    ("augment=flipp", r"no augmentation 'flipp'.*did you mean 'flip'"),
    ("keep=sometimes", r"keep must be none, or every:N"),
    ("keep_clients=every:0", r"keep_clients must be none, last, or every:N"),
    ("diagnose=every:0", r"diagnose must be none, or every:N, not 'every:0'"),
    ("diagnose=last", r"diagnose must be none, or every:N, not 'last'"),
    ("track=wandb", r"track=wandb.*'none' or 'tensorboard'"),
    ("model=cnnn", r"no model 'cnnn'.*did you mean 'cnn'"),
    ("norm=bach", r"'bach'"),
    ("local_epochs=1 local_steps=3", r"local_epochs and local_steps exclude each other"),
    ("nesterov=true momentum=0", r"nesterov=true needs a momentum"),
    ("stop_at_target=true", r"needs a target"),
    ("nonsense", r"'nonsense' is neither a setting"),
    # methods
    ("method=fedprx", r"no method 'fedprx': did you mean 'fedprox'\?"),
    ("method=fedprox:nu=1", r"option of method 'fedprox' called 'nu'"),
    ("method=fedprox:mu=much", r"mu of method 'fedprox' must be a number"),
    ("method=fedprox:1,2", r"one too many"),
    ("method=fedavg:1", r"'fedavg' takes 0 options"),
    ("method=fedavg:mu=1", r"'fedavg' has no options"),
    ("method=fedavgm+fedadam", r"'fedavgm' and 'fedadam' both decide the server step"),
    ("method=fedprox+fedprox", r"'fedprox' appears twice"),
    ("method=central+fedprox", r"cannot be combined"),
    ("method=fedprox+", r"empty part"),
    ("method=", r"empty part|has no name"),
    ("method=missing.py:Mine", r"which does not exist"),
    ("method=methods.py:Nothing", r"'Nothing'"),
    ("method=methods.py:not_a_class", r"is not a method"),
    ("method=methods.py:Forgotten", r"lacks @dataclass"),
    ("method=broken.py:Mine", r"broken\.py could not be run: SyntaxError"),
    ("method=methods.py:Refuses", r"it wants a larger batch"),
    ("method=scaffold persistent_momentum=true", r"persistent_momentum"),
    # data
    ("data=digitz", r"'digitz'.*did you mean 'digits'"),
    ("data=synthetic:samples=ten", r"samples of data set 'synthetic' must be a whole number"),
    ("data=synthetic:sample=10", r"did you mean 'samples'"),
    ("data=synthetic:samples=3", r"at least 10"),
    ("data=./missing.npz", r"no file or folder '.*missing\.npz'"),
    ("data=npz", r"root"),
    ("data=npz root=missing.npz", r"missing\.npz"),
    ("data=folder root=missing", r"missing"),
    ("data=truncated.npz", r"'truncated\.npz' cannot be read"),
    ("data=gap.npz", r"no training sample of class '2'"),
    ("data=gap-in-training.npz", r"no training sample of class '2'"),
    ("data=short.npz", r"one label a picture"),
    ("data=nan.npz", r"NaN"),
    ("data=file", r"file' is a file isofed does not read"),
    ("data=empty", r"no pictures"),
    ("data=one-broken", r"one-broken/dog/3\.png' cannot be read"),
    # splits
    ("partition=dirichlet", r"needs alpha"),
    ("partition=dirichlet:0", r"alpha of split 'dirichlet' must be above zero"),
    ("partition=dirichlet:-0.5", r"alpha of split 'dirichlet' must be above zero"),
    ("partition=dirichlet:a", r"alpha of partition 'dirichlet' must be a number"),
    ("partition=quantity:0", r"alpha of split 'quantity' must be above zero"),
    ("partition=dirichelt:0.1", r"no partition 'dirichelt': did you mean 'dirichlet'"),
    ("partition=domain", r"needs data with domains"),
    ("partition=pathological:99", r"asks for 99 classes"),
    ("partition=pathological:2 clients=3", r"leaves some of the 10 classes to nobody"),
    ("partition=iid clients=201", r"201 clients cannot share 200 samples"),
    ("partition=dirichlet:0.1 clients=1000", r"clients"),
    ("partition=from_file:missing.json", r"no file '.*missing\.json'"),
    ("partition=from_file:text.json", r"cannot be read as JSON"),
    ("partition=from_file:twice.json clients=2", r"sample 2 .* belongs to one client"),
    ("partition=from_file:beyond.json clients=2", r"sample 5000"),
    # files of settings
    ("missing.yaml", r"missing\.yaml cannot be read"),
    ("list.yaml", r"'key: value'"),
    ("bad.yaml", r"not valid YAML"),
    ("unknown.yaml", r"no setting 'learning_rate'"),
    ("empty", r"config\.yaml cannot be read"),
]


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_one_sentence_before_any_work(words: str, expected: str, here: Path, tmp_path: Path) -> None:
    before = everything(here)
    usual = (*SMALL, "executor=serial", "rounds=1", f"out={tmp_path / 'never' / 'made'}")
    defaults = {word.partition("=")[0]: word for word in usual}
    if "local_steps" in words:
        defaults.pop("local_epochs")
    given = [word for key, word in defaults.items() if not any(w.startswith(key + "=") for w in words.split(" "))]
    done = isofed("run", *given, *words.split(" "), cwd=here)
    said = complaint(done, 2)
    assert re.search(expected, said), said
    assert done.out == ""
    assert everything(here) == before and not os.listdir(tmp_path)


COMMANDS = [
    ("compare", r"at least one method"),
    ("compare fedavg fedprx", r"did you mean 'fedprox'"),
    ("compare fedavg fedavg", r"'fedavg' is given twice"),
    ("compare fedprox fedprox:mu=0.01", r"given twice"),
    ("compare fedavg seeds=0", r"seeds must be at least 1"),
    ("compare fedavg seeds=two", r"seeds must be a whole number"),
    ("compare fedavg seeds=,", r"seeds"),
    ("compare fedavg seeds=1,1", r"seed"),
    ("compare fedavg seeds=-1,2", r"seed=-1"),
    ("compare fedavg lr=abc", r"lr=abc"),
    ("compare fedavg lrr=0.1", r"no setting 'lrr'"),
    ("compare fedavg data=digitz", r"'digitz'"),
    ("compare fedavg partition=dirichlet:0", r"above zero"),
    ("compare fedavg unknown.yaml", r"no setting 'learning_rate'"),
    ("compare fedavg out=file/below", r"file/below"),
    ("compare fedavg out=file", r"file"),
    ("tune", r"tune takes one method"),
    ("tune fedavg fedprox lr=0.1,0.2", r"tune takes one method"),
    ("tune fedavg", r"nothing to tune"),
    ("tune fedavg lr=0.1", r"nothing to tune.*lr=0\.01,0\.03,0\.1$"),
    (
        "tune fedavg augment=crop:1,none",
        r"nothing to tune.*'augment=crop:1,none' is one value.*as in augment=none,crop",
    ),
    ("tune fedprox fedprox.mu=", r"fedprox\.mu|nothing to tune"),
    ("tune fedavg lr=,", r"lr|nothing to tune"),
    ("tune fedavg lr=0.1,abc", r"lr=abc"),
    ("tune fedavg lrr=0.1,0.2", r"no setting 'lrr'"),
    ("tune fedprox fedprox.nu=1,2", r"called 'nu'"),
    ("tune fedprox fedavgm.momentum=0.1,0.2", r"'fedavgm'"),
    ("tune fedavg lr=0.1,0.2 validation=0", r"needs a validation part"),
    ("tune fedavg lr=0.1,0.2 missing.yml", r"missing\.yml"),
    ("tune fedavg lr=0.1,0.2 seeds=0", r"seeds must be at least 1"),
    ("methods scafold", r"did you mean 'scaffold'"),
    ("data digitz", r"'digitz'"),
    ("data good.npz clients=1000", r"1000 clients|clients"),
    ("data good.npz partition=iid clients=2 picture=split.txt", r"\.png, \.svg or \.pdf"),
    ("data good.npz partition=iid clients=2 picture=missing/split.png", r"no folder 'missing'"),
    ("data good.npz one-broken partition=iid", r"one-broken|one data set"),
    ("run out=file/below", r"cannot make the run folder file/below"),
    ("run out=file", r"cannot make the run folder file"),
    ("run out=/proc/nowhere/run", r"cannot make the run folder"),
    ("run --resume empty", r"not a run folder"),
]


@pytest.mark.parametrize(("words", "expected"), COMMANDS, ids=[words for words, _ in COMMANDS])
def test_every_command_refuses_in_one_sentence(words: str, expected: str, here: Path, tmp_path: Path) -> None:
    before = everything(here)
    name, *rest = words.split(" ")
    settings = [*SMALL, "executor=serial", "rounds=1"] if name in ("run", "compare", "tune") else []
    if name in ("compare", "tune") and not any(w.startswith("out=") for w in rest):
        settings.append(f"out={tmp_path / 'never' / 'made'}")
    if "--resume" in rest:
        settings = []
    given = [w for w in settings if not any(r.startswith(w.partition("=")[0] + "=") for r in rest)]
    said = complaint(isofed(name, *given, *rest, cwd=here), 2)
    assert re.search(expected, said), said
    assert everything(here) == before and not os.listdir(tmp_path)


def test_debug_shows_where_it_happened(here: Path) -> None:
    for words, name in (("lr=abc", "UserError"), ("data=truncated.npz", "UserError"), ("lr=1e30", "RunError")):
        out = f"out={here / f'debug-{words}'}"
        code, _, err = isofed("run", *SMALL, "rounds=1", "--debug", words, out, cwd=here)
        assert code in (1, 2)
        assert err.startswith("Traceback") and f"isofed.errors.{name}: " in err
    shutil.rmtree(here / "debug-lr=1e30")


def test_a_real_process_says_the_same(here: Path) -> None:
    assert "did you mean 'fedprox'?" in complaint(plain("run", "method=fedprx", cwd=here), 2)
    code, _, err = plain("run", "method=fedprx", "--debug", cwd=here)
    assert code != 0 and err.startswith("Traceback") and "did you mean 'fedprox'?" in err
    assert not (here / "runs").exists()


def test_an_unknown_option_or_command_is_refused(here: Path) -> None:
    for words in (["run", "--fast"], ["rum"], ["settings", "lrate"], ["methods", "--fast"]):
        code, out, err = isofed(*words, cwd=here)
        assert code == 2 and out == "" and "Traceback" not in err
        assert words[-1] in err


def test_a_good_file_of_settings_is_read_and_words_win(here: Path, tmp_path: Path) -> None:
    succeeds("run", *SMALL[:3], here / "good.yaml", "rounds=1", "lr=0.3", f"out={tmp_path / 'run'}")
    assert config(tmp_path / "run")["lr"] == 0.3
    assert config(tmp_path / "run")["clients"] == 2
    assert config(tmp_path / "run")["method"] == [{"fedprox": {"mu": 0.1}}]
