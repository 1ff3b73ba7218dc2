"""Words for a person's eyes that messages of all parts share."""

from __future__ import annotations


def many(count: int, word: str) -> str:
    """``1 round``, ``3 rounds``, ``2 classes``."""
    return f"{count:,} {word}{'' if count == 1 else 'es' if word.endswith('s') else 's'}"


def kind_of(thing: object) -> str:
    """``an int``, ``a Tensor``, ``None``."""
    name = type(thing).__name__
    return "None" if thing is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
