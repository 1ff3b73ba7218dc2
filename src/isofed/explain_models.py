"""``isofed models``: the networks with their sizes and parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from isofed import models, spec
from isofed.diagnostics.cost import pass_macs
from isofed.display import show_paragraphs, simple_table
from isofed.errors import UserError, unknown
from isofed.plugins import is_file_reference
from isofed.words import many

_NARROW = 80  # characters, below which what is said of a network would be a column of single words


def listing(console: Console, words: Sequence[str]) -> None:
    """Networks in a table, for pictures of some size and a number of classes; those that are named, in more detail."""
    values, named = {"size": "32", "classes": "10", "channels": "3", "norm": ""}, []
    known = models.describe()
    for word in words:
        key, equals, text = word.partition("=")
        if equals and key in values:
            values[key] = text
        elif equals:
            raise UserError(f"'{word}' means nothing here; write size=, classes=, channels= or norm=, as in size=96")
        elif word in known or is_file_reference(word):
            named.append(word)
        else:
            raise unknown("model", word, known)
    size, classes, channels = (spec.convert(values[k], int, k) for k in ("size", "classes", "channels"))
    if min(size, classes, channels) < 1:
        raise UserError("size, classes and channels must be at least 1")
    shape, norm = (channels, size, size), values["norm"] or None
    table = simple_table("model", "parameters", "MACs (M)", "features", "")
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    for name in named or known:
        try:
            made = models.create(name, classes=classes, shape=shape, norm=norm)
            macs = pass_macs(made) / 1e6
        except UserError as error:
            if named:
                raise
            table.add_row(escape(name), "-", "-", "-", escape(str(error)))
            continue
        table.add_row(
            escape(name),
            f"{_parameters(made):,}",
            f"{macs:,.2f}" if macs >= 0.01 else f"{macs:.4f}",
            f"{made.width:,}",
            known.get(name, "your own"),
        )
    if console.width < _NARROW:
        show_paragraphs(console, table)
    else:
        console.print(table)
    for name in named:
        console.print()
        console.print(_parts(name, models.create(name, classes=classes, shape=shape, norm=norm), shape))
    console.print(
        f"\nFor {many(classes, 'class')} and pictures of {size}x{size} with {many(channels, 'channel')}; others: "
        "isofed models size=96 classes=7. MACs are the multiply-accumulates of convolutions and linear layers in one "
        "sample's pass. Your own: model=path/to/file.py:build.",
        highlight=False,
    )


def _parts(name: str, network: models.Network, shape: tuple[int, int, int]) -> Table:
    """What a network consists of, by the names that methods know, with what comes out of each part."""
    with torch.no_grad():
        output = network.eval()(torch.zeros(2, *shape))
    table = simple_table(f"part of {escape(name)}", "output", "parameters")
    for stage, made in output.stages.items():
        table.add_row(escape(stage), _size(made), f"{_parameters(network.stages[stage]):,}")
    if network.projector is not None:
        table.add_row("projector", _size(output.features), f"{_parameters(network.projector):,}")
    else:
        table.add_row("features", _size(output.features), "0")
    table.add_row("head", _size(output.logits), f"{_parameters(network.head):,}")
    return table


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _size(made: Tensor) -> str:
    return " x ".join(map(str, made.shape[1:]))
