"""How fast data are read: a folder of pictures through isofed, and a set in binary files, at the first start and later.

The first start decodes every picture and keeps it; a later one maps what was kept. Beside them, in the same repeat, the
same files are read with Pillow in a plain ``torch.utils.data.DataLoader``, as one would by hand: resized to the same
size, into batches of 256, in the process and with as many workers as there are cores. A first start also lists the
folders, divides the pictures, finds mean and std, and writes and checks what it keeps. Each start is a load in this
process, with the files in the system's page cache in all cases; the time to import Python packages is in none of them.
``every byte`` is a later start that also reads all of the pictures once, since a map alone has not touched them.

    python benchmarks/data.py                          the table
    python benchmarks/data.py --repeats 9 --json data.json
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

import record
from isofed.data import Dataset, load
from isofed.data.cache import cached, fingerprint

CLASSES, SIZE = 10, 64


def draw(folder: Path, count: int, side: int) -> list[Path]:
    """Pictures in class folders: smooth shapes with some noise, so that they compress about as photographs do."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:side, 0:side] / side
    files = []
    for number in range(count):
        a, b, c = rng.uniform(1, 9, (3, 3))
        waves = np.sin(a * x[..., None] + b) * np.cos(c * y[..., None]) * 90 + 128
        pixels = (waves + rng.normal(0, 12, waves.shape)).clip(0, 255).astype(np.uint8)
        path = folder / f"class-{number % CLASSES}" / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, quality=90)
        files.append(path)
    return files


class Pictures(TorchDataset[torch.Tensor]):
    """The loop that everyone writes."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: int) -> torch.Tensor:
        with Image.open(self.files[place]) as image:
            small = image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(small))


def with_a_data_loader(files: list[Path], workers: int) -> torch.Tensor:
    return torch.cat(list(DataLoader(Pictures(files), batch_size=256, num_workers=workers)))


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def touch(dataset: Dataset) -> int:
    """Read every byte of the pictures."""
    return sum(int(part.images.view(-1).max()) for part in (dataset.train, dataset.test))


def folder_of_pictures(place: Path, count: int, side: int, repeats: int) -> dict[str, list[float]]:
    files = draw(place / "pictures", count, side)
    root, cores = str(place / "pictures"), os.cpu_count() or 1
    times: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        shutil.rmtree(os.environ["ISOFED_CACHE"], ignore_errors=True)
        now = {
            "DataLoader, in the process": seconds(lambda: with_a_data_loader(files, 0)),
            f"DataLoader, {cores} workers": seconds(lambda: with_a_data_loader(files, cores)),
            "isofed, first start": seconds(lambda: load(f"folder:size={SIZE}", root)),
            "isofed, later start": seconds(lambda: load(f"folder:size={SIZE}", root)),
            "isofed, later, every byte": seconds(lambda: touch(load(f"folder:size={SIZE}", root))),
        }
        for name, value in now.items() if repeat else ():  # the first repeat warms up
            times.setdefault(name, []).append(value)
    return times


def binary_set(place: Path, repeats: int) -> dict[str, list[float]]:
    """A set as large as CIFAR-100 in its publisher's binary form, through the source and through the cache."""
    folder = place / "cifar-100-binary"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, count in (("train", 50_000), ("test", 10_000)):
        records = rng.integers(0, 256, (count, 3074), dtype=np.uint8)
        records[:, 0], records[:, 1] = np.arange(count) % 20, np.arange(count) % 100
        records.tofile(folder / f"{name}.bin")
    (folder / "fine_label_names.txt").write_text("".join(f"class {i}\n" for i in range(100)))
    (folder / "coarse_label_names.txt").write_text("".join(f"group {i}\n" for i in range(20)))
    files = {name: folder / f"{name}.bin" for name in ("train", "test")}

    def mapped() -> dict[str, Any]:
        def fill(arrays: dict[str, Any]) -> None:
            for name, file in files.items():
                planes = np.fromfile(file, dtype=np.uint8).reshape(-1, 3074)[:, 2:].reshape(-1, 3, 32, 32)
                for channel in range(3):
                    arrays[name][..., channel] = planes[:, channel]

        shapes = {"train": ((50_000, 32, 32, 3), "uint8"), "test": ((10_000, 32, 32, 3), "uint8")}
        return cached("benchmark", {"files": fingerprint(files.values())}, shapes, fill)

    times: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        shutil.rmtree(os.environ["ISOFED_CACHE"], ignore_errors=True)
        now = {
            "data=cifar100, first start": seconds(lambda: load("cifar100", str(place))),
            "data=cifar100, later start": seconds(lambda: load("cifar100", str(place))),
            "cache, first start": seconds(mapped),
            "cache, later start": seconds(mapped),
        }
        for name, value in now.items() if repeat else ():
            times.setdefault(name, []).append(value)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pictures", type=int, default=2000)
    parser.add_argument("--side", type=int, default=96, help="pixels of the pictures in the folder")
    parser.add_argument("--json", type=record.file, help="write all numbers here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="isofed-benchmark-") as temporary:
        place = Path(temporary)
        os.environ["ISOFED_CACHE"] = str(place / "cache")
        count, side = arguments.pictures, arguments.side
        cases = {
            f"{count:,} JPEGs of {side}x{side} to {SIZE}x{SIZE}": (
                count,
                folder_of_pictures(place, count, side, arguments.repeats),
            ),
            "a binary set of the size of CIFAR-100": (60_000, binary_set(place, arguments.repeats)),
        }
    for title, (pictures, times) in cases.items():
        print(f"{title:44}{'milliseconds':>28}{'pictures/s':>14}")
        for name, values in times.items():
            middle = statistics.median(values)
            cell = f"{1e3 * middle:.1f} ({1e3 * min(values):.1f} to {1e3 * max(values):.1f})"
            print(f"  {name:42}{cell:>28}{pictures / middle:>14,.0f}")
    print(f"median (range) of {arguments.repeats} repeats, all kinds in turn in each")
    found = {title: {"pictures": pictures, "seconds": times} for title, (pictures, times) in cases.items()}
    record.write(arguments, "cpu", ("pillow",), cases=found)


if __name__ == "__main__":
    main()
