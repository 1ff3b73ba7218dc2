"""The command line: ``isofed run`` and the other commands, each with its help and its examples."""

from __future__ import annotations

import errno
import functools
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Annotated, Any

import click
import typer
from rich.console import Console

from isofed.errors import IsofedError
from isofed.help import Command, Commands, help_text
from isofed.stopping import NobodyReads, terminated
from isofed.traces import place_of

app = typer.Typer(
    name="isofed",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _Output(Console):
    """Where a command writes. When nobody reads on, rich would end the process; here the command is interrupted."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _send_nowhere(self.file)
        raise NobodyReads


# A file or a pipe has no width of its own: room enough that no table is cut, unless COLUMNS says how much there is.
_WIDE = (sys.stdout is not None and sys.stdout.isatty()) or os.environ.get("COLUMNS", "").isdecimal()
console = _Output(width=None if _WIDE else 160, emoji=False)  # which file.py:M: would be
errors = _Output(stderr=True, soft_wrap=True, emoji=False)

Words = Annotated[list[str] | None, typer.Argument(help="settings as key=value, and YAML files", show_default=False)]
MethodsAndWords = Annotated[
    list[str] | None, typer.Argument(help="methods, settings as key=value, and YAML files", show_default=False)
]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="show nothing but the result")]


def command(function: Callable[..., None], group: typer.Typer = app) -> Callable[..., None]:
    """Turn errors into one sentence and an exit code: 2 for a mistake in what was asked, 1 for failed work."""

    @functools.wraps(function)
    def guarded(*args: Any, debug: bool = False, **kwargs: Any) -> None:
        try:
            with terminated():
                function(*args, debug=debug, **kwargs)
        except IsofedError as error:
            if debug:
                traceback.print_exc()
            _complain(str(error))
            raise typer.Exit(error.exit_code) from None
        except NobodyReads:  # and there was nothing to be stopped but the output
            raise typer.Exit(0) from None
        except KeyboardInterrupt as error:
            how = f" {error}" if str(error) else ""
            _complain(f"stopped.{how}")
            raise typer.Exit(130) from None
        except SystemExit as error:  # nothing of ours calls that
            code = "" if error.code is None else repr(error.code)
            _complain(f"code of your own called sys.exit({code}){place_of(error)}: raise an exception instead")
            raise typer.Exit(1) from None
        except BrokenPipeError:  # whoever read the output has had enough
            sys.stderr.close()
            raise typer.Exit(0) from None
        except Exception as error:
            if debug:
                traceback.print_exc()
            from isofed.memory import shortage

            if lack := shortage(error):
                _complain(lack)
                raise typer.Exit(1) from None
            if _has_no_room(error):
                _give_up_output()
                raise typer.Exit(1) from None
            place = place_of(error)
            said = f"{type(error).__name__}: {str(error).rstrip('.')}{place}"
            whose = "code of your own failed with" if place else "internal error,"
            _complain(f"{whose} {said}. Run it again with --debug to see {'more' if place else 'where'}.")
            raise typer.Exit(1) from None

    return group.command(cls=Command, help=help_text(function.__doc__ or ""))(guarded)


_NO_ROOM = "what is to be shown cannot be written: no space is left where the output goes"


def _has_no_room(error: Exception) -> bool:
    """Whether it is the output itself that could not be written; of a file, the name would be known."""
    return isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None


def _give_up_output() -> None:
    """Say it, and let what is still to be written go nowhere: Python would try again when it ends, and complain."""
    _complain(_NO_ROOM)
    _send_nowhere(sys.stdout)


def _send_nowhere(stream: IO[str]) -> None:
    with suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def _complain(text: str) -> None:
    with suppress(OSError, NobodyReads):  # the terminal is closed, or nobody reads that, either
        errors.print(f"isofed: {text}", style="red" if errors.is_terminal else None, highlight=False, markup=False)


@command
def run(
    words: Words = None,
    resume: Annotated[str | None, typer.Option(help="a run folder to go on with", metavar="RUN")] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train one federation and record it in a run folder.

    Settings are key=value words, YAML files, or both; later ones win. `isofed settings` lists them all.

    [bold]Examples[/]

      isofed run method=fedprox:mu=0.01 data=digits partition=dirichlet:0.1
      isofed run method=fedprox+fedbn data=digits-domains partition=domain
      isofed run experiment.yaml seed=1 out=runs/second
      isofed run runs/second/config.yaml      # the same run again
      isofed run --resume runs/second         # after an interruption
      isofed run --resume runs/second rounds=40   # with more rounds
    """
    from isofed import commands

    commands.run(console, words or [], resume, quiet)


@command
def compare(words: MethodsAndWords = None, quiet: Quiet = False, debug: Debug = False) -> None:
    """Compare methods over seeds, on the same splits and initial weights.

    Words without '=' before any ':' are methods; the first is what the others are compared with. seeds=3 means three
    seeds, seeds=1,5,9 those; without it there is one. The same command again does only what is missing.

    [bold]Examples[/]

      isofed compare fedavg fedprox scaffold data=digits seeds=3
      isofed compare fedavg fedprox:mu=0.1 my_method.py:Mine rounds=30 target=0.8
    """
    from isofed import commands

    commands.compare(console, words or [], quiet)


@command
def tune(words: MethodsAndWords = None, quiet: Quiet = False, debug: Debug = False) -> None:
    """Try a grid of settings on a validation part, then judge the best one on the test part, once.

    Give a method and at least one setting with several values; fedprox.mu means the option mu of fedprox. seeds=2
    tries each on two seeds and chooses by the mean; without it there is one.

    [bold]Examples[/]

      isofed tune fedavg lr=0.01,0.03,0.1 data=digits
      isofed tune fedprox fedprox.mu=0.001,0.01,0.1 lr=0.03,0.1 seeds=2
    """
    from isofed import commands

    commands.tune(console, words or [], quiet)


@command
def methods(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="a method to explain; settings such as model=cnn to find its cost on", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """List the methods with paper, defaults and cost, or explain one: what it does, where it acts, its options.

    Costs are found by running each method for a moment, on a small ResNet or on what settings say.

    [bold]Examples[/]

      isofed methods
      isofed methods scaffold
      isofed methods fednova+spherefed model=resnet56
      isofed methods path/to/mine.py:Mine
    """
    from isofed import explain

    explain.methods(console, words or [])


@command
def models(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="networks; size=, classes=, channels= and norm= to count for", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """List the networks with their parameters, multiply-accumulates and feature width, or look into some.

    Of a network that is named, also the parts, by whose names methods act on it, and what comes out of them. All for
    ten classes and pictures of 32x32 with three channels, unless you say otherwise.

    [bold]Examples[/]

      isofed models
      isofed models size=96 classes=7
      isofed models resnet18 classes=100
    """
    from isofed import explain_models

    explain_models.listing(console, words or [])


@command
def data(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="a data set or a path, and settings as key=value; or get NAME", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """Show what a data set holds and how it is split, as a table and, with picture=FILE, as a chart; or fetch one.

    [bold]Examples[/]

      isofed data                                     # what there is
      isofed data digits partition=dirichlet:0.05 picture=split.png
      isofed data path/to/pictures partition=domain   # your own
      isofed data get cifar100 root=datasets          # from its publisher
    """
    from isofed import commands

    commands.data(console, words or [])


@command
def privacy(
    words: Annotated[list[str] | None, typer.Argument(help="options as key=value", show_default=False)] = None,
    debug: Debug = False,
) -> None:
    """Tell before a run which epsilon a noise amounts to, or which noise an
    epsilon asks for.

    Options: clients, rounds, participation, delta, at (server or client), and
    noise or epsilon, one or several.

    [bold]Examples[/]

      isofed privacy clients=1000 participation=0.05 rounds=200
      isofed privacy clients=1000 participation=0.05 rounds=200 epsilon=2,8
    """
    from isofed import privacy_plan

    privacy_plan.privacy(console, words or [])


@command
def diagnose(
    words: Annotated[
        list[str] | None, typer.Argument(help="run folders; options as key=value", show_default=False)
    ] = None,
    debug: Debug = False,
) -> None:
    """Measure what heterogeneity did to the models that runs have kept, and write diagnosis.json into each run folder.

    Measured are labels, cost, calibration, spectra, alignment, curvature, landscape and tsne; only=A,B chooses some.
    More is found where a run kept models: keep=every:10 those of rounds, keep_clients=last those of clients.
    samples=512, probes=64, points=21 and clients=5 say how closely, device= where; root= where data are
    now that were elsewhere.

    [bold]Examples[/]

      isofed diagnose runs/mine
      isofed diagnose runs/demo only=spectra,curvature    # a whole comparison
    """
    from isofed import diagnose as diagnosing

    diagnosing.diagnose(console, words or [])


@command
def report(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="run folders, or folders of comparisons; out=FILE for the page", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write one HTML page about runs: the answer, interactive charts, the table, the split and how to repeat it.

    The page is one file, opens without a network, and holds everything that it shows.

    [bold]Examples[/]

      isofed report runs/demo                    # writes report.html
      isofed report runs/first runs/second out=both.html
      isofed report runs/demo figures=figures    # the pictures as SVG and PNG, too
    """
    from isofed.report import commands

    commands.report(console, words or [])


@command
def watch(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="run folders, or folders of comparisons; port=N", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """Serve the same page while runs go on, to browsers on this machine only; Ctrl-C ends it, never a run.

    [bold]Examples[/]

      isofed watch runs/demo
      isofed watch runs/first runs/second port=9000
    """
    from isofed.report import commands

    commands.watch(console, words or [])


@command
def paper(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="a paper, a table or figure of it; options as key=value", show_default=False),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="only show the table: paper and measured side by side")] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run the tables and figures of the papers again, and set them beside the published numbers.

    Without a paper it lists them with what is done. Runs stop cleanly when budget= is spent, and the same command goes
    on. only=A,B chooses cells that have these words in them, methods=A,B rows; seeds=3, variant=paper, scale=0.3 (a
    shortened version, labelled so) or scale=tiny say what of them; data_root= where the data are, results= and runs=
    where it is recorded; device=, precision=, executor= and slots= how. whole=true starts only what should end within
    the budget, keep_runs=true leaves models in place, alone=false says that the machine does other work as well, and
    times do not count then. Any other setting, such as lr=0.1 or feduv.lam=2.5, tries something out: such results are
    kept apart.

    [bold]Examples[/]

      isofed paper                               # what there is, and what is done
      isofed paper feduv table1 only=cifar100 budget=25m data_root=datasets
      isofed paper feduv table1 --show
      isofed paper pages                         # write docs/results anew
    """
    from isofed.papers import command as papers

    papers.paper(console, words or [], show, quiet)


@command
def bench(words: Words = None, debug: Debug = False) -> None:
    """Measure local steps a second on this machine: each executor against a bare PyTorch loop, in turns.

    Pictures are made up, of 32 x 32 x 3. models=A,B chooses the networks, repeats=N how often all take their turn,
    json=FILE keeps every number. Settings of the training count too: device, precision, batch_size, method, augment,
    executor, workers, slots. Without device= it is a GPU, if there is one.

    [bold]Examples[/]

      isofed bench                               # takes a minute
      isofed bench models=cnn,resnet20 batch_size=32 workers=4 repeats=5
      isofed bench device=cuda precision=bf16 model=resnet18 json=bench.json
      isofed bench method=feduv augment=crop:4+flip    # against a loop without
    """
    from isofed import bench as benchmark

    benchmark.bench(console, words or [])


@command
def settings(
    words: Annotated[list[str] | None, typer.Argument(help="settings, or parts of them", show_default=False)] = None,
    debug: Debug = False,
) -> None:
    """List every setting of a run with its default and meaning, or some.

    [bold]Examples[/]

      isofed settings
      isofed settings lr batch      # those with 'lr' or 'batch' in their names
    """
    from isofed import commands

    commands.settings(console, words or [])


import isofed.flower.cli  # noqa: E402, F401  the commands below `isofed flower`, made with what is above


def _version(show: bool) -> None:
    if show:
        from isofed import __version__

        console.print(f"isofed {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="show the version")
    ] = False,
) -> None:
    """Federated learning on data that differ from client to client.

    A first run takes seconds and downloads nothing: isofed run rounds=3
    """


def main() -> None:
    """The entry point of the ``isofed`` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a sign that a terminal does not know is no reason to stop
    code = 0
    try:
        try:
            code = app(standalone_mode=False) or 0
        except click.UsageError as error:
            code = _explain(error)
        finally:
            if sys.stdout is not None:  # closed by who called
                sys.stdout.flush()
    except OSError as error:  # of --help, which no command is asked for, or of what was still to be written
        if not _has_no_room(error):
            raise
        _give_up_output()
        code = 1
    if code == 130:  # who presses Ctrl-C again has been heard; what ends with the process takes a moment
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def _explain(error: click.UsageError) -> int:
    """What is wrong with options, in a sentence; a group that is called without a command shows what it has."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
    else:
        said, path = error.format_message().rstrip("."), error.ctx.command_path if error.ctx else "isofed"
        if isinstance(error, click.NoSuchOption):
            near = f"; did you mean '{error.possibilities[0]}'?" if error.possibilities else ""
            said = f"there is no option '{error.option_name}'{near}"
        _complain(f"{said[:1].lower()}{said[1:]}{'' if said.endswith('?') else ';'} {path} --help shows how it is used")
    return error.exit_code


if __name__ == "__main__":
    main()
