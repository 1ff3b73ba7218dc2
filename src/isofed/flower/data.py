"""The data of a deployment: each site's own folder, and what the server knows of them, which is how many there are.

An *adapter* reads a site's folder. The one that ``isofed flower new`` writes calls :func:`read_folder`; change it where
your files are laid out in another way. Whatever it returns stays at the site.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isofed.config import Settings
from isofed.data import AT_SITES, FILES, Dataset, Part, load
from isofed.data.sources.decode import folders_in
from isofed.data.sources.table import Table
from isofed.engine.world import World
from isofed.errors import UserError
from isofed.flower.pictures import read_pictures
from isofed.flower.terms import Refusal, Terms, site_folder
from isofed.flower.terms import Table as Facts
from isofed.words import many

Adapter = Callable[[Path, tuple[int, int, int]], Dataset]  # folder, and (channels, height, width) of a picture


def read_folder(folder: Path, shape: tuple[int, int, int], apart: bool = True, **columns: Any) -> Dataset:
    """Pictures in class folders or listed by a .csv file, of the federation's shape, or an .npz file.

    The page on your own data says how each of them looks. ``columns`` are the options of a table, such as
    ``label="finding"``. ``apart=False`` sets no test part aside where pictures come without one.
    """
    if folder.is_dir() and len(tables := [*folder.glob("*.csv")]) == 1 and not folders_in(folder):
        folder = tables[0]  # beside the pictures that it lists
    if folder.is_dir() or FILES.get(folder.suffix.lower()) == "table":
        return read_pictures(folder, shape, Table(**columns), apart)
    return load(folder)


def shape_of(terms: Terms) -> tuple[int, int, int]:
    """Channels, height and width, which all sites share."""
    channels, height, width = (int(value) for value in terms.numbers("shape"))
    return channels, height, width


def server_world(settings: Settings, terms: Terms, samples: Sequence[int]) -> World:
    """The server's view of the federation: who has how many samples, and the pictures that it judges by, if any."""
    if settings.data != AT_SITES:
        return World.create(settings)
    if terms.test_data:
        shape = shape_of(terms)
        found = _of_federation(read_folder(Path(terms.test_data).expanduser(), shape, apart=False), terms, shape)
        test = Part(
            torch.cat([found.train.images, found.test.images]), torch.cat([found.train.labels, found.test.labels])
        )
    else:
        test = _nothing(terms)
    dataset = dataclasses.replace(_empty(terms), test=test)
    return _world(settings, dataset, [np.zeros(count, np.int64) for count in samples])


def site_world(
    settings: Settings, terms: Terms, node: Facts, number: int, total: int, adapter: Adapter = read_folder
) -> World:
    """What a site works with; of the other sites it knows no more than the number of all samples."""
    if settings.data != AT_SITES:
        return World.create(settings)
    shape = shape_of(terms)
    try:
        dataset = _of_federation(adapter(site_folder(node), shape), terms, shape)
    except Refusal:
        raise
    except UserError as error:
        raise UserError(f"the site's data cannot be used: {error}") from error
    clients = [np.zeros(0, np.int64)] * (settings.clients or 1)
    clients[number] = np.arange(len(dataset.train))
    if len(clients) > 1 and total > len(dataset.train):
        clients[(number + 1) % len(clients)] = np.zeros(total - len(dataset.train), np.int64)
    return _world(settings, dataset, clients)


def _world(settings: Settings, dataset: Dataset, clients: list[np.ndarray]) -> World:
    return World(settings, dataset, {"train": dataset.train, "test": dataset.test}, clients)


def _empty(terms: Terms) -> Dataset:
    channels = shape_of(terms)[0]
    part = _nothing(terms)
    mean = terms.numbers("mean") or (0.5,) * channels
    std = terms.numbers("std") or (0.5,) * channels
    return Dataset(AT_SITES, terms.class_names, part, part, mean, std)


def _nothing(terms: Terms) -> Part:
    channels, height, width = shape_of(terms)
    return Part(torch.empty(0, height, width, channels, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))


def _of_federation(own: Dataset, terms: Terms, shape: tuple[int, int, int]) -> Dataset:
    """The same pictures under the federation's classes, mean and standard deviation."""
    if own.shape != shape:
        raise Refusal(f"has pictures of shape {list(own.shape)}, and the federation's are {list(shape)}")
    names = {name: number for number, name in enumerate(terms.class_names)}
    if unknown := [name for name in own.classes if name not in names]:
        raise Refusal(f"has {many(len(unknown), 'class')} that the federation does not know; see classes= of the run")
    place = torch.tensor([names[name] for name in own.classes])
    parts = [Part(part.images, place[part.labels]) for part in (own.train, own.test)]
    return dataclasses.replace(_empty(terms), train=parts[0], test=parts[1], notes=own.notes)
