"""What the commands below ``isofed flower`` do."""

from __future__ import annotations

import importlib.util
import json
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from isofed.config import read_words
from isofed.display import percent
from isofed.errors import RunError, UserError

if importlib.util.find_spec("flwr") is None:
    raise UserError("isofed flower needs the extra: pip install 'isofed[flower]'")

from isofed.flower import processes
from isofed.flower.control import Control
from isofed.flower.keys import Keys, make_server_keys, make_site_key
from isofed.flower.local import Local, open_server, tell
from isofed.flower.processes import Group, check_installed, start_site
from isofed.flower.project import read_table, write_project

NO_KEYS = "--insecure: nothing is encrypted, and whoever can reach the port can read the model, take part and end runs"


def new(console: Console, folder: Path, words: Sequence[str]) -> None:
    """Write a project."""
    write_project(folder, _typed(read_words(words)))
    _say(
        console,
        f"{folder} is ready; {folder / 'README.md'} says how to go on. To try it here: isofed flower up {folder}",
    )


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
    fresh = not Keys(where).certificate.exists()
    made = make_server_keys(where, hosts)
    if not fresh and hosts:
        raise UserError(f"{made.certificate} is there already; remove {where} to make a new one, which all sites need")
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
        with Local(app, work, _folders(folders), insecure) as local:
            if not quiet:
                _say(console, f"a server and {local.sites} sites are up{'' if insecure else ', with TLS and keys'}")
            out = local.run(lambda line: None if quiet else _round(console, line))
    _result(console, out)


def _folders(path: str | None) -> dict[int, Path]:
    if path is None:
        return {}
    found = sorted(p for p in Path(path).expanduser().iterdir() if p.is_dir()) if Path(path).is_dir() else []
    if not found:
        raise UserError(f"folders={path} has no folders in it: one for each site")
    return dict(enumerate(found))


def server(console: Console, folder: Path, host: str, port: int, insecure: bool) -> None:
    """A server, in the foreground."""
    check_installed()
    read_table(folder)
    if insecure:
        _say(console, NO_KEYS)
    group = Group(folder / "work" / "flower" / "server")
    found = _keys(folder, insecure)
    _foreground(group, lambda: open_server(group, found, host, port, folder.absolute() / "work" / "flower.db"))


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
    if data is not None and not data.expanduser().exists():
        raise UserError(f"there is no folder {data}")
    if insecure:
        _say(console, NO_KEYS)
    where = (state or folder / "work" / "states" / name).expanduser().absolute()
    node: dict[str, object] = {"partition-id": number, "name": name, "state": str(where), "device": device}
    if data is not None:
        node["data"] = str(data.expanduser().absolute())
    group = Group(folder.absolute() / "work" / "flower" / name)

    def begin() -> None:
        start_site(group, _keys(folder, insecure), server, name, node)

    def revive() -> None:
        if group.revive(begin):
            _say(console, f"{name} has ended, which may be because the server does not let it in yet; it tries again")

    _foreground(group, begin, revive)


def _keys(folder: Path, insecure: bool) -> Keys | None:
    return None if insecure else Keys((folder / "keys").absolute())


def _foreground(group: Group, start: Callable[[], None], revive: Callable[[], None] | None = None) -> None:
    """Run processes until Ctrl-C; those that end by themselves are started again, where that makes sense."""
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
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
    out = Path(str(read_table(folder).get("out", "runs/flower")))
    found = _keys(folder, insecure)
    if found and not found.token.is_file():
        raise UserError(f"there is no {found.token}; start runs on the server's machine, in its project folder")
    with Control(server, found) as control:
        for key in found.public() if found else ():
            if control.register(key) and not quiet:
                _say(console, f"{key.stem} may take part from now on")
        run, seen = control.start(folder), 0
        while not (status := control.status(run)).over:
            seen = tell(out, seen, lambda line: None if quiet else _round(console, line))
            time.sleep(1)
        if not status.well:
            raise RunError(f"the run has ended: {status.details or 'it was stopped'}; see {out}")
        tell(out, seen, lambda line: None if quiet else _round(console, line))
    if out.is_dir():
        _result(console, out)


def stop(console: Console, folder: Path, server: str, insecure: bool) -> None:
    """End runs."""
    with Control(server, _keys(folder, insecure)) as control:
        ended = control.stop_all()
    _say(console, f"{ended} runs were ended")


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
    _say(console, f"accuracy {percent(result['accuracy'])} % after {result['rounds']} rounds; recorded in {out}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
