"""How commands explain themselves: help that fits any terminal, and a word to whoever mistypes one or a setting."""

from __future__ import annotations

import inspect

import click
import typer
from typer.core import TyperCommand, TyperGroup

from isofed.errors import unknown


def help_text(text: str) -> str:
    """A docstring as a terminal of any width shows it well: prose that it can wrap, examples one to a line."""
    prose, _, examples = inspect.cleandoc(text).partition("[bold]Examples[/]")
    paragraphs = [" ".join(paragraph.split()) for paragraph in prose.split("\n\n")]
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    return "\n\n".join([*filter(None, paragraphs), "\n".join(["[bold]Examples[/]", *lines])])


class Commands(TyperGroup):
    """Commands of which the nearest is named to whoever asks for one that does not exist."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name and not name.startswith("-") and self.get_command(ctx, name) is None:
            click.echo(f"isofed: {unknown('command', name, self.list_commands(ctx))}", err=True)
            raise typer.Exit(2)
        return super().resolve_command(ctx, args)


class Command(TyperCommand):
    """A command that tells whoever writes a setting as an option how it is written."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)  # parsing uses them up
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from isofed.config import Settings

            key = error.option_name.lstrip("-").replace("-", "_")
            if key == "resume":  # of `run` alone
                said = f"the same command again goes on: {ctx.command_path} has no option '--resume'"
                click.echo(f"isofed: {said}", err=True)
                raise typer.Exit(2) from None
            if key not in (*Settings.model_fields, "seeds", "out") or "words" not in {p.name for p in self.params}:
                raise
            value = _value_after(given, error.option_name)
            said = f"isofed: there is no option '{error.option_name}': settings have no dashes, write {key}={value}"
            click.echo(said, err=True)
            raise typer.Exit(2) from None


def _value_after(words: list[str], option: str) -> str:
    for word, following in zip(words, [*words[1:], "..."], strict=True):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return "..."
