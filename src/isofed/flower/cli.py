"""The commands below ``isofed flower``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from isofed.cli import Debug, Quiet, Words, app, command, console
from isofed.help import Commands

group = typer.Typer(
    name="flower",
    cls=Commands,
    help="The same federation at real sites, over Flower.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(group)
sub = functools.partial(command, group=group)

Folder = Annotated[Path, typer.Argument(help="the project's folder", show_default=False)]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="no encryption, no keys: whoever can reach the port reads the model and takes part; for one machine only",
    ),
]


@sub
def new(folder: Folder, words: Words = None, debug: Debug = False) -> None:
    """Write a ready project: settings, an adapter for a site's own folder, and a README with every command.

    [bold]Examples[/]

      isofed flower new clinics classes=benign,malignant clients=5 rounds=50
      isofed flower new trial data=digits clients=2    # without any folder
    """
    from isofed.flower import commands

    commands.new(console, folder, words or [])


@sub
def keys(
    folder: Folder,
    site: Annotated[str | None, typer.Option(help="make only this site's own key, at the site", metavar="NAME")] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="a name or address by which sites reach the server; may be repeated")
    ] = None,
    debug: Debug = False,
) -> None:
    """Make certificates and keys in the project's folder `keys`: the server's, or with --site those of one site.

    [bold]Examples[/]

      isofed flower keys clinics --host fed.example.org    # at the server
      isofed flower keys clinics --site clinic-a           # at the site
    """
    from isofed.flower import commands

    commands.keys(console, folder, site, host or [])


@sub
def up(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="a project's folder, or settings as key=value", show_default=False),
    ] = None,
    insecure: Insecure = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Start a whole federation on this machine, run it, and end it: server, sites, certificates and keys.

    With settings instead of a folder, it makes a project for the time being. folders=PATH gives each site one of the
    folders in PATH, in the order of their names.

    [bold]Examples[/]

      isofed flower up method=scaffold data=digits clients=2 rounds=2
      isofed flower up clinics folders=pictures
    """
    from isofed.flower import commands

    commands.up(console, words or [], insecure, quiet)


@sub
def server(
    folder: Folder,
    host: Annotated[str, typer.Option(help="the address to listen on; 0.0.0.0 for all of this machine")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="the port that sites connect to", min=1, max=65535)] = 8000,
    insecure: Insecure = False,
    debug: Debug = False,
) -> None:
    """Run Flower's server, until Ctrl-C. It asks for TLS, a registered key of sites, and a token of coordinators.

    [bold]Examples[/]

      isofed flower server clinics --host 0.0.0.0 --port 8000
    """
    from isofed.flower import commands

    commands.server(console, folder, host, port, insecure)


@sub
def site(
    folder: Folder,
    number: Annotated[int, typer.Option(help="the site's number, counted from 0", min=0)],
    name: Annotated[str, typer.Option(help="the site's name, which is that of its key")],
    server: Annotated[str, typer.Option(help="host:port of the server")],
    data: Annotated[Path | None, typer.Option(help="the site's own folder; what is in it stays there")] = None,
    state: Annotated[Path | None, typer.Option(help="where it remembers; in the project if not given")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1")] = "cpu",
    insecure: Insecure = False,
    debug: Debug = False,
) -> None:
    """Run a site, until Ctrl-C. It connects to the server by itself, and again whenever the connection is lost.

    [bold]Examples[/]

      isofed flower site clinics --number 0 --name clinic-a \\
        --server fed.example.org:8000 --data our/pictures
    """
    from isofed.flower import commands

    commands.site(console, folder, number, name, server, data, state, device, insecure)


@sub
def start(
    folder: Folder,
    server: Annotated[str, typer.Option(help="host:port of the server")] = "127.0.0.1:8000",
    insecure: Insecure = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Let in the sites whose public keys are in keys/sites, start the run, and show how it goes.

    Ctrl-C leaves the run going. Started again, a run that was broken off goes on after its last complete round.

    [bold]Examples[/]

      isofed flower start clinics
    """
    from isofed.flower import commands

    commands.start(console, folder, server, insecure, quiet)


@sub
def stop(
    folder: Folder,
    server: Annotated[str, typer.Option(help="host:port of the server")] = "127.0.0.1:8000",
    insecure: Insecure = False,
    debug: Debug = False,
) -> None:
    """End the runs that are going on at a server; `isofed flower start` goes on with them.

    [bold]Examples[/]

      isofed flower stop clinics
    """
    from isofed.flower import commands

    commands.stop(console, folder, server, insecure)
