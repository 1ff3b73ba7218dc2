"""What the commands below ``isofed flower`` do."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from isofed import extras
from isofed.config import read_words, settings
from isofed.data import AT_SITES
from isofed.display import percent
from isofed.errors import RunError, UserError
from isofed.files import locked

if importlib.util.find_spec("flwr") is None:
    raise UserError(f"isofed flower needs Flower: {extras.command('flower')}")

from isofed.flower import processes
from isofed.flower.addresses import joined, split, why_not
from isofed.flower.control import Control
from isofed.flower.keys import Keys, make_server_keys, make_site_key, private_folder
from isofed.flower.local import Local, open_server, reason, run_folder, tell
from isofed.flower.processes import Group, check_installed, start_site
from isofed.flower.project import read_table, write_project
from isofed.flower.terms import changed, read
from isofed.records import CONFIG, RESULT, RunFolder
from isofed.stopping import interruptible, resumable
from isofed.words import many

OVER = "the run in {} is over; more rounds, or another out=, would make it go on or begin another"
TRIED = "the trial in {} is over; another out= begins another"
NO_KEYS = "--insecure: nothing is encrypted, and whoever can reach the port can read the model, take part and end runs"


def new(console: Console, folder: Path, words: Sequence[str]) -> None:
    """Write a project."""
    table = write_project(folder, _typed(read_words(words)))
    own = " folders=PATH, with a folder in it for each site" if table["data"] == AT_SITES else ""
    _say(
        console,
        f"{folder} is ready; {folder / 'README.md'} says how to go on. To try it here: isofed flower up {folder}{own}",
    )
    if own and not any(word.startswith("classes=") for word in words):
        said = f"the classes {table['classes']} are an example: write yours into {folder / 'pyproject.toml'} first"
        _say(console, said)


def _typed(values: dict[str, Any]) -> dict[str, Any]:
    """Values of the command line as TOML's own types, where they are numbers or truth values."""

    def typed(value: Any) -> Any:
        if isinstance(value, str):
            try:
                found = json.loads(value.lower() if value.lower() in ("true", "false") else value)
            except ValueError:
                return value
            return found if isinstance(found, (int, float)) else value
        return value

    texts = ("classes", "shape", "mean", "std", "out", "test_data")
    return {key: str(value) if key in texts else typed(value) for key, value in values.items() if value is not None}


def keys(console: Console, folder: Path, site: str | None, hosts: Sequence[str]) -> None:
    """Make keys."""
    where = folder / "keys"
    if site is not None:
        path = make_site_key(where, site)
        _say(console, f"{path} stays here; send {path.with_suffix('.pub')} to the coordinator")
        return
    if not (folder / "pyproject.toml").is_file():  # a mistyped name would get certificates that no server finds
        raise UserError(
            f"there is no project in {folder}: the server's keys go into one that `isofed flower new` made; "
            "a site's, with --site, into any folder"
        )
    fresh = not Keys(where).certificate.exists()
    made = make_server_keys(where, hosts)
    if not fresh and hosts:
        _say(console, f"{made.certificate} is now for {', '.join(hosts)}; start the server again to use it")
    _say(console, f"give {made.ca} to every site; everything else in {where} stays on this machine")


def up(console: Console, words: Sequence[str], insecure: bool, quiet: bool) -> None:
    """A federation on this machine."""
    check_installed()
    given = [word for word in words if "=" not in word]
    if len(given) > 1:
        raise UserError(f"'{given[1]}' is one folder too many; give one project, or settings as key=value")
    values = read_words(word for word in words if "=" in word)
    folders = values.pop("folders", None)
    if given and values:
        raise UserError(f"{next(iter(values))}= is in the project's pyproject.toml; change it there")
    with tempfile.TemporaryDirectory(prefix="isofed-") as temporary:
        app, work = (Path(given[0]), Path(given[0]) / "work") if given else (Path(temporary) / "app", Path(temporary))
        if not given:
            values.setdefault("data", "digits")
            write_project(app, _typed(values) | {"out": str(Path(str(values.get("out", "runs/flower"))).absolute())})
        if insecure:
            _say(console, NO_KEYS)
        local = Local(app, work, _folders(folders), insecure)
        _enough(local, folders)
        if _is_over(app, local.folder):
            _say(console, (OVER if given else TRIED).format(local.folder))
            _result(console, local.folder)
            return
        if not given and (local.folder / CONFIG).exists():
            raise UserError(
                f"{local.folder} holds a trial of other settings, or one that was stopped, whose keys are gone: choose "
                "another out=; a project of `isofed flower new` can go on"
            )
        _writable(local.folder)
        kept = resumable(f"isofed flower up {shlex.join(words)}") if given else "Without a project it cannot go on."
        try:
            with interruptible(kept), local:
                if not quiet:
                    _say(console, f"a server and {local.sites} sites are up{'' if insecure else ', with TLS and keys'}")
                    if seen := local.recorded():
                        _say(console, f"the run in {local.folder} goes on after {many(seen, 'round')}")
                out = local.run(
                    lambda line: None if quiet else _round(console, line),
                    lambda text: None if quiet else _say(console, text),
                )
        except RunError as error:
            logs = work / "logs"
            if not given:  # they would go with the rest
                logs = local.folder / "logs"
                shutil.copytree(work / "logs", logs, dirs_exist_ok=True)
            raise RunError(f"{error}; the logs are in {logs}") from error
    _result(console, out)


def _is_over(app: Path, out: Path) -> bool:
    """Whether a run folder holds the whole run that a project asks for."""
    if not (out / RESULT).exists():
        return False
    return not changed(settings(RunFolder.open(out).config), read(read_table(app))[0])


def _enough(local: Local, folders: str | None) -> None:
    """Each site has a folder where it needs one, which is said before anything is started."""
    if read_table(local.app).get("data") == AT_SITES and len(local.folders) != local.sites:
        if folders is None:
            raise UserError("with data=sites each site needs a folder: give folders=PATH, with one in it for each site")
        found = many(len(local.folders), "folder")
        # One folder too many would be left out without a word.
        raise UserError(
            f"folders={folders} has {found} in it, and there are {local.sites} sites: "
            f"set clients = {len(local.folders)}, or name a folder with {local.sites} in it"
        )


def _writable(out: Path) -> None:
    """The run folder can be made, which is said before anything is started; the logs of a failure go there, too."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"cannot make the run folder {out}: there is a file in its place") from error
    except OSError as error:
        raise UserError(f"cannot make the run folder {out}: {error.strerror}") from error


def _folders(path: str | None) -> dict[int, Path]:
    if path is None:
        return {}
    where = Path(path).expanduser()
    if not where.is_dir():
        raise UserError(f"there is no folder {path}: folders= names one that has a folder for each site")
    found = sorted(p for p in where.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not found:
        raise UserError(f"folders={path} has no folders in it: one for each site")
    return dict(enumerate(found))


def server(console: Console, folder: Path, host: str, port: int, insecure: bool) -> None:
    """A server, in the foreground."""
    check_installed()
    read_table(folder)
    if insecure:
        _say(console, NO_KEYS)
    folder = folder.absolute()
    group = Group(folder / "work" / "flower" / "server", folder=folder)
    found = _keys(folder, insecure)

    def begin() -> None:
        let_in = open_server(group, found, host, port, folder / "work" / "flower.db")
        who = f"; it lets in {', '.join(let_in) or 'no site yet: keys/sites is empty'}" if found else ""
        _say(console, f"the server is up at {joined(host, port)}{who}")

    _foreground(group, begin)


def site(
    console: Console,
    folder: Path,
    number: int,
    name: str,
    server: str,
    data: Path | None,
    state: Path | None,
    device: str,
    insecure: bool,
) -> None:
    """A site, in the foreground."""
    check_installed()
    split(server)
    if data is not None and not data.expanduser().exists():
        raise UserError(f"there is no folder or file {data}")
    if insecure:
        _say(console, NO_KEYS)
    where = (state or folder / "work" / "states" / name).expanduser().absolute()
    node: dict[str, object] = {"partition-id": number, "name": name, "state": str(where), "device": device}
    if data is not None:
        node["data"] = str(data.expanduser().absolute())
    group = Group(folder.absolute() / "work" / "flower" / name)
    found = _keys(folder, insecure)

    def begin() -> None:
        start_site(group, found, server, name, node)

    def revive() -> None:
        if group.revive(begin):
            _say(console, f"{name} is not connected: {why_not(server, found.ca if found else None)}; it tries again")

    _foreground(group, begin, revive)


def _keys(folder: Path, insecure: bool) -> Keys | None:
    return None if insecure else Keys((folder / "keys").absolute())


def _foreground(group: Group, start: Callable[[], None], revive: Callable[[], None] | None = None) -> None:
    """Run processes until Ctrl-C; those that end by themselves are started again, where that makes sense."""
    private_folder(group.home)
    with interruptible(), locked(group.home / ".lock", f"'{group.home.name}' in {group.home.parent.parent}"):
        try:
            start()
            while revive or group.alive():
                time.sleep(0.5)
                if revive:
                    revive()
            raise RunError("one of its processes has ended; the lines above say why")
        finally:
            processes.stop(group)


def start(console: Console, folder: Path, server: str, insecure: bool, quiet: bool) -> None:
    """Register the sites, start the run and follow it."""
    check_installed()
    out = run_folder(folder)
    if _is_over(folder, out):
        _say(console, OVER.format(out))
        _result(console, out)
        return
    found = _keys(folder, insecure)
    with Control(server, found) as control:
        for key in found.public() if found else ():
            if control.register(key) and not quiet:
                _say(console, f"{key.stem} may take part from now on")
        if (seen := tell(out, 0, lambda line: None)) and not quiet:
            _say(console, f"the run in {out} goes on after {many(seen, 'round')}")
        run = control.start(folder)
        try:
            while not (status := control.status(run)).over:
                seen = tell(out, seen, lambda line: None if quiet else _round(console, line))
                time.sleep(1)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("The run itself goes on; `isofed flower stop` ends it.") from None
        if not status.well:
            hint = "; `isofed flower stop` ends what is going on" if "is in use by another" in status.details else ""
            raise RunError(f"the run has ended: {reason(status) or 'it was stopped'}{hint}; see {out}")
        tell(out, seen, lambda line: None if quiet else _round(console, line))
    if out.is_dir():
        _result(console, out)


def stop(console: Console, folder: Path, server: str, insecure: bool) -> None:
    """End runs."""
    with Control(server, _keys(folder, insecure)) as control:
        ended = control.stop_all()
    _say(console, f"{many(ended, 'run')} {'was' if ended == 1 else 'were'} ended")


def _round(console: Console, line: dict[str, Any]) -> None:
    accuracy = line.get("accuracy")
    if line.get("skipped"):
        text = f"round {line['round']} is skipped: {line['skipped']}"
    else:
        judged = "" if accuracy is None else f", accuracy {percent(accuracy)} %"
        text = f"round {line['round']}: {line['clients']} sites{judged}"
    _say(console, text)
    for event in line["events"]:
        _say(console, f"  client {event['client']} {event['event']}")


def _result(console: Console, out: Path) -> None:
    result = json.loads((out / "result.json").read_text())
    _say(
        console, f"accuracy {percent(result['accuracy'])} % after {many(result['rounds'], 'round')}; recorded in {out}"
    )
    if spent := result.get("privacy"):
        told = f"epsilon {spent['epsilon']:.3g} at delta {spent['delta']:g}"
        _say(console, f"privacy of a whole client: {told}, as result.json explains")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
