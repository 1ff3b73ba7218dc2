"""What ``isofed report`` and ``isofed watch`` do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from isofed import spec
from isofed.config import is_setting
from isofed.display import note
from isofed.errors import UserError, unknown
from isofed.report import write_report
from isofed.report.answer import SURE
from isofed.words import many


def report(console: Console, words: Sequence[str]) -> None:
    """The page of finished or unfinished runs as a file."""
    paths, options = _read(words, ("out", "figures"), "isofed report runs/demo")
    out = Path(options.get("out", "report.html"))
    page = write_report(paths, out)
    size = f"{out.stat().st_size / 1e6:.1f} MB" if out.stat().st_size >= 1e6 else f"{out.stat().st_size / 1e3:.0f} kB"
    said = page["answer"]
    lines = [said["question"], said["headline"]]
    if page["several"]:
        lines += [f"{name}: {text}" for name, text in said["details"]]
    else:  # a headline alone would claim too much
        lines += [text for what, text in said["details"] if what in SURE]
    console.print("\n".join(lines), highlight=False, markup=False)
    for text in page["problems"]:
        console.print(note(text))
    told = f"{many(len(page['runs']), 'run')} on one page ({size}): {out}"
    console.print(told, highlight=False, markup=False, soft_wrap=True)
    if "figures" in options:
        from isofed.report.figures import write_all

        drawn = write_all(paths, Path(options["figures"]))
        told = f"{many(len(drawn), 'figure file')}: {options['figures']}"
        console.print(told, highlight=False, markup=False, soft_wrap=True)


def watch(console: Console, words: Sequence[str]) -> None:
    """The page as it changes, until Ctrl-C."""
    from isofed.report.watch import Watch

    paths, options = _read(words, ("port",), "isofed watch runs/demo")
    port = spec.convert(options["port"], int, "port") if "port" in options else None
    watching = Watch(paths, port)
    console.print(f"open {watching.address} in a browser on this machine; Ctrl-C ends it", highlight=False)
    try:
        watching.serve()
    except KeyboardInterrupt:
        raise KeyboardInterrupt("The runs were not touched.") from None
    finally:
        watching.close()


def _read(words: Sequence[str], known: Sequence[str], example: str) -> tuple[list[Path], dict[str, str]]:
    """Folders and ``key=value`` words."""
    options = dict(word.split("=", 1) for word in words if is_setting(word))
    for key in options:
        if key not in known:
            raise unknown("option", key, known)
    paths = [Path(word) for word in words if not is_setting(word)]
    if not paths:
        raise UserError(f"name at least one run folder, for example: {example}")
    return paths, options
