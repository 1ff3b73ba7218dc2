"""Keys, projects and the command line, without starting anything."""

from __future__ import annotations

import errno
import io
import stat
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from isofed.cli import app
from isofed.config import settings as make_settings
from isofed.errors import RunError, UserError
from isofed.federation import Federation
from isofed.flower import terms
from isofed.flower.control import Status
from isofed.flower.keys import Keys, make_server_keys, make_site_key, write_secret
from isofed.flower.link import Bounded, TokenAuth
from isofed.flower.local import Local
from isofed.flower.processes import Group, stop
from isofed.flower.project import read_table, write_project


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_servers_certificate_is_signed_and_for_its_names(tmp_path: Path) -> None:
    keys = make_server_keys(tmp_path / "keys", ["federation.example.org", "10.0.0.7"])
    root, own = (x509.load_pem_x509_certificate(path.read_bytes()) for path in (keys.ca, keys.certificate))
    own.verify_directly_issued_by(root)
    names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "federation.example.org"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1", "10.0.0.7"]
    assert root.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not own.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    for secret in (keys.private, keys.token, keys.secret, tmp_path / "keys" / "ca.key"):
        assert mode(secret) == 0o600, secret
    assert mode(tmp_path / "keys") == 0o700
    before = keys.certificate.read_bytes(), keys.token.read_bytes()
    make_server_keys(tmp_path / "keys")
    assert (keys.certificate.read_bytes(), keys.token.read_bytes()) == before
    assert len(keys.token.read_text()) >= 40
    ca, token = keys.ca.read_bytes(), keys.token.read_bytes()
    make_server_keys(tmp_path / "keys", ["moved.example.org"])  # sites keep their ca.crt
    renewed = x509.load_pem_x509_certificate(keys.certificate.read_bytes())
    renewed.verify_directly_issued_by(root)
    names = renewed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "moved.example.org"]
    assert (keys.ca.read_bytes(), keys.token.read_bytes()) == (ca, token)
    (tmp_path / "keys" / "ca.key").unlink()
    with pytest.raises(UserError, match="put it back to sign with it"):
        make_server_keys(tmp_path / "keys", ["again.example.org"])


@pytest.mark.parametrize("host", ["a b", "a.example:8000", "https://a.example", "", "a..b", "-a"])
def test_a_host_that_is_none_leaves_nothing_behind(tmp_path: Path, host: str) -> None:
    with pytest.raises(UserError, match="is not a name or an address of a host"):
        make_server_keys(tmp_path / "keys", [host])
    assert not (tmp_path / "keys").exists()
    keys = make_server_keys(tmp_path / "other", ["bücher.example"])
    names = x509.load_pem_x509_certificate(keys.certificate.read_bytes()).extensions
    found = names.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)
    assert found[1] == "xn--bcher-kva.example"


def test_a_secret_is_private_also_in_a_file_that_was_not(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"something longer than what follows")
    path.chmod(0o644)
    write_secret(path, b"new")
    assert (path.read_bytes(), mode(path)) == (b"new", 0o600)


def test_a_sites_key_stays_what_it_is(tmp_path: Path) -> None:
    path = make_site_key(tmp_path, "clinic-a")
    assert mode(path) == 0o600
    private = load_ssh_private_key(path.read_bytes(), None)
    public = load_ssh_public_key(path.with_suffix(".pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(public, ec.EllipticCurvePublicKey)
    assert private.public_key().public_numbers() == public.public_numbers()
    before = path.read_bytes()
    assert make_site_key(tmp_path, "clinic-a").read_bytes() == before
    sent = path.with_suffix(".pub").rename(tmp_path / "sent.pub").read_bytes()
    assert make_site_key(tmp_path, "clinic-a").read_bytes() == before  # moving the public half away is no reason
    assert path.with_suffix(".pub").read_bytes() == sent
    (tmp_path / "sites" / "junk.key").write_text("junk")
    with pytest.raises(UserError, match="is not a key that"):
        make_site_key(tmp_path, "junk")
    for name in ("../x", "", "a/b", "-x", "a b"):
        with pytest.raises(UserError, match="cannot be called"):
            make_site_key(tmp_path, name)


def test_a_project_is_a_flower_app_without_secrets(tmp_path: Path) -> None:
    from flwr.cli.build import build_fab_from_disk

    table = write_project(tmp_path / "Our Clinics!", {"clients": 3, "classes": "a,b", "method": "fedprox:mu=0.1"})
    folder = tmp_path / "Our Clinics!"
    assert read_table(folder) == table
    settings, given = terms.read(read_table(folder))
    assert (settings.clients, settings.data, given.class_names) == (3, "sites", ("a", "b"))
    make_server_keys(folder / "keys")
    make_site_key(folder / "keys", "clinic")
    (folder / "keys" / "note.md").write_text("secret")
    (folder / "runs").mkdir()
    (folder / "runs" / "metrics.jsonl").write_text("{}")
    with pytest.warns(DeprecationWarning, match="gitwildmatch"):
        bundle = build_fab_from_disk(folder)
    names = set(zipfile.ZipFile(io.BytesIO(bundle)).namelist())
    code = {f"federation/{name}.py" for name in ("__init__", "client_app", "server_app", "data")}
    assert code < names <= code | {"pyproject.toml", "README.md", ".gitignore", ".info/CONTENT"}
    for name in ("isofed flower up .", "isofed flower keys .", "isofed flower server .", "isofed flower start ."):
        assert name in (folder / "README.md").read_text()


def test_a_project_trains_as_a_simulation_with_the_same_words_would(tmp_path: Path) -> None:
    made = terms.read(write_project(tmp_path / "plain", {"data": "digits"}))[0]
    simulated = make_settings({"data": "digits", "clients": 2, "train_loss": False})
    assert made.epochs == simulated.epochs == 5
    assert made.model_copy(update={"local_epochs": None}).to_dict() == simulated.to_dict()
    made = terms.read(write_project(tmp_path / "steps", {"data": "digits", "local_steps": 10}))[0]
    assert (made.epochs, made.local_steps) == (None, 10)


def test_a_project_needs_an_empty_folder_and_possible_settings(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="min_clients=9"):
        write_project(tmp_path / "new", {"min_clients": 9})
    assert not (tmp_path / "new").exists()
    write_project(tmp_path / "new", {})
    with pytest.raises(UserError, match="is not empty"):
        write_project(tmp_path / "new", {})
    with pytest.raises(UserError, match="is not a project.*pyproject.toml is missing$"):
        read_table(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool]\n")
    with pytest.raises(UserError, match="has no proper table"):
        read_table(tmp_path)


def call(*words: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["flower", *map(str, words)])
    return result.exit_code, " ".join(result.output.split())


def test_the_commands_say_what_is_wrong(tmp_path: Path) -> None:
    code, said = call("new", tmp_path / "p", "clients=2", "classes=a,b", "lr=0.1")
    assert code == 0, said
    assert read_table(tmp_path / "p")["lr"] == 0.1
    code, said = call("server", tmp_path / "p")
    assert (code, "make keys first with `isofed flower keys`" in said) == (2, True)
    code, said = call("site", tmp_path / "p", "--number", "0", "--name", "a", "--server", "127.0.0.1:1")
    assert (code, "a site needs the server's ca.crt and a key of its own" in said) == (2, True)
    code, said = call("start", tmp_path / "p")
    assert (code, "on the server's machine" in said) == (2, True)
    assert call("keys", tmp_path / "p", "--site", "a")[0] == 0
    assert call("keys", tmp_path / "p")[0] == 0
    assert Keys(tmp_path / "p" / "keys").public()[0].name == "a.pub"
    code, said = call("keys", tmp_path / "p", "--host", "later.example.org")
    assert (code, "is now for later.example.org" in said) == (0, True)
    code, said = call("keys", tmp_path / "mistyped", "--host", "fed.example.org")
    assert (code, "there is no project in" in said, (tmp_path / "mistyped").exists()) == (2, True, False)
    assert call("keys", tmp_path / "at-a-site", "--site", "b")[0] == 0  # which has no project
    code, said = call("stop", tmp_path / "nowhere")
    assert (code, "on the server's machine" in said) == (2, True)
    (tmp_path / "file").touch()
    code, said = call("new", tmp_path / "file")
    assert (code, "is a file; name a new folder" in said) == (2, True)
    code, said = call("site", tmp_path / "p", "--number", "0", "--name", "a", "--server", "localhost")
    assert (code, "give host:port" in said) == (2, True)
    code, said = call("up", tmp_path / "p")
    assert (code, "give folders=PATH" in said) == (2, True)
    (tmp_path / "one" / "site").mkdir(parents=True)
    code, said = call("up", tmp_path / "p", f"folders={tmp_path / 'one'}")
    assert (code, "has 1 folder in it, and there are 2 sites" in said) == (2, True)
    for name in ("a", "b", "c", ".ipynb_checkpoints"):
        (tmp_path / "three" / name).mkdir(parents=True)
    code, said = call("up", tmp_path / "p", f"folders={tmp_path / 'three'}")
    assert (code, "has 3 folders in it, and there are 2 sites: set clients = 3" in said) == (2, True)
    code, said = call("start", tmp_path / "p", "--server", "127.0.0.1:1")
    assert (code, "no server answers at 127.0.0.1:1" in said) == (1, True)
    code, said = call("up", tmp_path / "p", "lr=0.2")
    assert (code, "lr= is in the project's pyproject.toml" in said) == (2, True)
    code, said = call("up", tmp_path / "p", f"folders={tmp_path / 'none'}")
    assert (code, "there is no folder" in said and "has a folder for each site" in said) == (2, True)
    (tmp_path / "empty").mkdir()
    code, said = call("up", tmp_path / "p", f"folders={tmp_path / 'empty'}")
    assert (code, "has no folders in it" in said) == (2, True)


def test_a_project_that_cannot_be_written_says_which_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str, **how: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")  # a write, unlike an open, knows no name

    monkeypatch.setattr(Path, "write_text", full)
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "p", tmp_path / "empty"):
        with pytest.raises(UserError, match=r"cannot write .*pyproject\.toml: No space left on device"):
            write_project(folder, {"data": "digits", "clients": 2})
    assert not (tmp_path / "p").exists()  # so that the same command can be given again
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_run_folder_that_cannot_be_made_is_said_before_anything_is_started(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, said = call("up", "data=digits", "clients=2", "rounds=1", f"out={tmp_path / 'file' / 'run'}")
    assert (code, "cannot make the run folder" in said, "are up" in said) == (2, True, False)


def test_a_run_that_is_over_is_shown_again_and_nothing_is_started(tmp_path: Path) -> None:
    words = {"data": "digits", "clients": 2, "rounds": 1, "model": "mlp", "lr": 0.1}
    write_project(tmp_path / "p", words | {"out": str(tmp_path / "run")})
    settings, _ = terms.read(read_table(tmp_path / "p"))
    Federation(out=tmp_path / "run", **settings.to_dict()).fit()
    given = [f"{k}={v}" for k, v in words.items()]
    code, said = call("up", *given, f"out={tmp_path / 'run'}")
    assert code == 0 and "is over" in said and "after 1 round; recorded in" in said and "are up" not in said
    # A trial's keys went with it, so that its sites would never be let in again.
    code, said = call("up", *given, "seed=5", f"out={tmp_path / 'run'}")
    assert code == 2 and "holds a trial of other settings, or one that was stopped" in said and "are up" not in said
    code, said = call("start", tmp_path / "p", "--server", "127.0.0.1:1")
    assert code == 0 and "is over" in said


def test_what_was_not_said_to_new_is_told(tmp_path: Path) -> None:
    code, said = call("new", tmp_path / "p")
    assert code == 0 and "the classes benign,malignant are an example" in said
    assert "example" not in call("new", tmp_path / "q", "classes=a,b")[1]
    for own in ("method=mine.py:Mine", "model=mine.py:net"):
        code, said = call("new", tmp_path / "r", own)
        assert code == 2 and "is a file, and sites run no code that they have not installed" in said
        assert not (tmp_path / "r").exists()


class Begins:
    """In place of a server's controls: the run waits for its sites."""

    def __enter__(self) -> Begins:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, app: Path) -> int:
        return 1

    def status(self, run: int) -> Status:
        return Status(over=False, well=False, details="")


def test_a_site_that_cannot_take_part_ends_a_trial_before_its_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_project(tmp_path / "app", {"data": "digits", "clients": 2})
    local = Local(tmp_path / "app", tmp_path / "work")
    monkeypatch.setattr(local, "control", Begins)
    (tmp_path / "work" / "logs" / "site-1.log").write_text("ERROR : isofed: 3 pictures are broken\n")
    said: list[str] = []
    with pytest.raises(RunError, match="the run cannot begin: site-1: 3 pictures are broken"):
        local.run(said=said.append)
    assert said == ["site-1: 3 pictures are broken"]


class Ended:
    """In place of a server's controls: the run is over, and went well."""

    def __enter__(self) -> Ended:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, app: Path) -> int:
        return 1

    def status(self, run: int) -> Status:
        return Status(over=True, well=True, details="")


def test_what_is_wrong_at_a_site_on_this_machine_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the site's log has it, and without a word the command would wait for as long as patience= says.
    write_project(tmp_path / "app", {"data": "digits", "clients": 2})
    logs = tmp_path / "work" / "logs"
    logs.mkdir(parents=True)
    (logs / "site-1.log").write_text("ERROR : isofed: of a run before\n")
    local = Local(tmp_path / "app", tmp_path / "work")
    monkeypatch.setattr(local, "control", Ended)
    with (logs / "site-1.log").open("a") as log:
        log.write("INFO : isofed: all is well\n" + 2 * "\x1b[91mERROR \x1b[0m:     isofed: 3 pictures are broken\n")
    said: list[str] = []
    local.run(said=said.append)
    local.run(said=said.append)
    assert said == ["site-1: 3 pictures are broken"]


def test_rounds_of_an_earlier_start_are_not_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_project(tmp_path / "app", {"data": "digits", "clients": 2})
    local = Local(tmp_path / "app", tmp_path / "work")
    monkeypatch.setattr(local, "control", Ended)
    local.folder.mkdir(parents=True)
    (local.folder / "metrics.jsonl").write_text('{"round": 1}\n{"round": 2}\n')
    told: list[dict[str, object]] = []
    local.run(told.append)
    assert (told, local.recorded()) == ([], 2)


def test_importing_isofed_does_not_import_flower() -> None:
    text = "import isofed, isofed.cli, isofed.federation, isofed.flower, sys; sys.exit('flwr' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0


def test_only_the_token_opens_the_controls() -> None:
    auth = TokenAuth("right")
    assert auth.validate_tokens_in_metadata([("flwr-access-token", "right")])[0]
    for wrong in ([], [("flwr-access-token", "wrong")], [("flwr-access-token", b"")]):
        assert auth.validate_tokens_in_metadata(wrong) == (False, None)
    assert auth.get_auth_tokens("any") is None
    assert auth.refresh_tokens([("refresh", "any")]) == (None, None)


@pytest.mark.parametrize(
    ("announced", "pieces", "read"),
    [(b"10", [10], 10), (b"11", [11], 0), (b"5", [5, 5, 5], 10), (b"x", [1], 0), (b"-1", [1], 0)],
)
def test_a_long_request_is_not_read(announced: bytes, pieces: list[int], read: int) -> None:
    """By what it announces; and where that is untrue, no further than the limit."""
    import asyncio
    from typing import Any

    got, sent, left = [0], [], list(pieces)

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request":
            got[0] += len(message["body"])
            if not message["more_body"]:
                return

    async def receive() -> Any:
        return {"type": "http.request", "body": b"0" * left.pop(0), "more_body": bool(left)}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": [(b"content-length", announced)]}
    with ThreadPoolExecutor(1) as thread:  # the tests of the page in a browser leave a loop running in this one
        thread.submit(lambda: asyncio.run(Bounded(inner, most=10)(scope, receive, send))).result()
    assert got[0] == read
    assert bool(sent) == (read == 0)


def test_processes_that_end_by_themselves_are_started_again(tmp_path: Path) -> None:
    group = Group(tmp_path / "home", tmp_path / "log")
    started: list[int] = []

    def start() -> None:
        started.append(group.start(sys.executable, "-c", "print('here', flush=True)").pid)

    try:
        assert not group.revive(start)  # nothing was started yet
        start()
        while group.alive():
            time.sleep(0.02)
        assert group.revive(start)
        assert not group.revive(start)  # not at once again
        assert len(set(started)) == 2
    finally:
        stop(group, patience=5)
    assert not group.revive(start)  # whoever ends it means it
    assert "here" in (tmp_path / "log").read_text()
