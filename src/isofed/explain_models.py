"""``isofed models``: the networks with their sizes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from isofed import models, spec
from isofed.diagnostics.cost import pass_macs
from isofed.display import simple_table
from isofed.errors import UserError


def listing(console: Console, words: Sequence[str]) -> None:
    """All networks in a table, for pictures of some size and a number of classes."""
    values = {"size": "32", "classes": "10", "channels": "3", "norm": ""}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in values:
            raise UserError(f"'{word}' means nothing here; write size=, classes=, channels= or norm=, as in size=96")
        values[key] = text
    size, classes, channels = (spec.convert(values[k], int, k) for k in ("size", "classes", "channels"))
    if min(size, classes, channels) < 1:
        raise UserError("size, classes and channels must be at least 1")
    table = simple_table("model", "parameters", "MACs (M)", "features", "")
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    for name, says in models.describe().items():
        try:
            made = models.create(name, classes=classes, shape=(channels, size, size), norm=values["norm"] or None)
            macs = pass_macs(made) / 1e6
        except UserError as error:
            table.add_row(name, "-", "-", "-", str(error))
            continue
        count = sum(p.numel() for p in made.parameters())
        table.add_row(name, f"{count:,}", f"{macs:,.2f}", f"{made.width:,}", says)
    console.print(table)
    console.print(
        f"\nFor {classes} classes and pictures of {size}x{size} with {channels} channels; others: isofed models "
        "size=96 classes=7. MACs are the multiply-accumulates of convolutions and linear layers in one sample's pass. "
        "Your own: model=path/to/file.py:build.",
        highlight=False,
    )
