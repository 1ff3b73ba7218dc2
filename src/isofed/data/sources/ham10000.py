"""HAM10000 (Tschandl et al. 2018): seven kinds of skin lesions from four sources."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isofed import draws
from isofed.data.base import Dataset, Index
from isofed.data.sources import Progress
from isofed.data.sources.decode import folders_in, pictures_in
from isofed.data.sources.domains import Split, parts
from isofed.data.sources.pictures import Listing, dataset, find, numbers, text
from isofed.errors import UserError

TABLES = ("HAM10000_metadata.csv", "HAM10000_metadata", "HAM10000_metadata.tab")
COLUMNS = ("lesion_id", "image_id", "dx", "dataset")
TESTED = 0.2  # of each class and domain


@dataclass(frozen=True)
class Ham10000:
    """HAM10000, 7 kinds of skin lesions from 4 institutions, from HAM10000_metadata(.csv) and its pictures.

    The classes are the sorted values of the column dx, the domains those of the column dataset, so that
    ``partition=domain`` makes an institution a client. The test set is FedUV's in size, about 20 % of each domain: of
    each class in it, whole lesions in an order drawn with ``split_seed``, as long as they fit into 20 % of its
    pictures. All pictures of a lesion are on one side, of a validation part too. ``split=feduv`` trains on all others;
    ``split=fedbn`` on equally many of each domain (half of the smallest one's). Pictures are squashed to size x size.
    """

    size: int = 96
    split: Split = "feduv"
    split_seed: int = 0

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        path = find("ham10000", root, TABLES, ("HAM10000", "ham10000", "dataverse_files"))
        table = next(path / name for name in TABLES if (path / name).exists())
        rows = _rows(table)
        listing = _listing(path, table, rows)
        test = lesions_to_test(listing, self.split_seed)
        places = parts("ham10000", listing, test, self.split, self.split_seed)
        return dataset("ham10000", self, listing, places, progress=progress)


def _rows(table: Path) -> list[dict[str, str]]:
    """The table, sorted by picture so that its order does not matter."""
    lines = text(table, "ham10000").splitlines()
    try:
        reader = csv.DictReader(lines, delimiter="\t" if lines and "\t" in lines[0] else ",", strict=True)
        rows = list(reader)
    except csv.Error as error:
        raise UserError(f"'{table}' cannot be read as a table with commas ({error})") from None
    for column in COLUMNS:
        if column not in (reader.fieldnames or ()):
            hint = ", which only the publishers' own table has" if column == "dataset" else ""
            raise UserError(f"'{table}' has no column '{column}'{hint}: it needs {', '.join(COLUMNS)}")
    seen: set[str] = set()
    for number, row in enumerate(rows, 1):
        for column in COLUMNS:
            if not row[column]:
                raise UserError(f"row {number} of '{table}' has nothing in the column '{column}'")
        if row["image_id"] in seen:
            raise UserError(f"row {number} of '{table}' names the picture {row['image_id']} a second time")
        seen.add(row["image_id"])
    if not rows:
        raise UserError(f"'{table}' has no rows: it needs one for each picture")
    return sorted(rows, key=lambda row: row["image_id"])


def _listing(path: Path, table: Path, rows: list[dict[str, str]]) -> Listing:
    folders = [f for f in folders_in(path) if f.name.lower().startswith(("images", "ham10000_images"))]
    if not folders:
        raise UserError(f"'{path}' has no pictures: 'ham10000' needs HAM10000_images_part_1/ and _2/, or images/")
    found = {file.stem: file for folder in folders for file in pictures_in(folder)}
    for row in rows:
        if row["image_id"] not in found:
            raise UserError(
                f"'{table}' names the picture {row['image_id']}, which is not in "
                f"{' or '.join(folder.name for folder in folders)} of '{path}'"
            )
    classes, domains = (tuple(sorted({row[column] for row in rows})) for column in ("dx", "dataset"))
    labels = numbers([classes.index(row["dx"]) for row in rows])
    where = numbers([domains.index(row["dataset"]) for row in rows])
    _, lesions = np.unique([row["lesion_id"] for row in rows], return_inverse=True)
    return Listing([found[row["image_id"]] for row in rows], labels, classes, where, domains, lesions)


def lesions_to_test(listing: Listing, seed: int) -> Index:
    """The places for testing, never some of a lesion's only; a lesion counts where its first picture is from."""
    assert listing.domains is not None and listing.groups is not None
    _, first, lesion, sizes = np.unique(listing.groups, return_index=True, return_inverse=True, return_counts=True)
    tested = np.zeros(len(first), dtype=bool)
    for domain in range(len(listing.domain_names)):
        for label in range(len(listing.classes)):
            mine = np.flatnonzero((listing.domains[first] == domain) & (listing.labels[first] == label))
            room = round(TESTED * int(sizes[mine].sum()))
            for one in draws.generator(seed, "data/ham10000/test", domain, label).permutation(mine):
                if sizes[one] <= room:
                    tested[one] = True
                    room -= int(sizes[one])
    return np.flatnonzero(tested[lesion])
