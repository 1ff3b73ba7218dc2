"""``isofed data get NAME``: data sets from their publishers, resumed, checked, and unpacked where nothing can escape.

A file is written as ``NAME.part`` and gets its name once its checksum is right; an archive is unpacked beside its
folder and the folder gets its name when it is whole. What has its name is therefore complete.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isofed.data.archives import unpack
from isofed.errors import RunError, UserError, unknown
from isofed.files import locked, write_error

Tell = Callable[[str, int, int | None], None]  # called with a file's name, bytes done, and bytes in all where known

TRIES = 5  # broken connections in a row, without one byte between them, before giving up
PATIENCE = 30.0  # seconds without a byte that count as a broken connection
_CHUNK = 1 << 18
_RESERVE = 64 << 20  # bytes that stay free on the disk


@dataclass(frozen=True)
class Remote:
    """A file as its publisher offers it."""

    url: str
    md5: str
    megabytes: float  # about; ten times as much is taken for something else

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Offer:
    """A data set that can be fetched: single files put into ``folder``, or an archive that holds ``folder``."""

    folder: str
    files: tuple[Remote, ...]
    unpacked: float = 0.0  # megabytes on the disk, about; zero for files that stay as they are


def _four(base: str, *sums: str) -> tuple[Remote, ...]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    sizes = (30.0, 0.1, 5.0, 0.1)
    return tuple(Remote(f"{base}/{n}-ubyte.gz", md5, size) for n, md5, size in zip(names, sums, sizes, strict=True))


_TORONTO = "https://www.cs.toronto.edu/~kriz"
OFFERS: dict[str, Offer] = {
    "cifar10": Offer(
        "cifar-10-batches-bin",
        (Remote(f"{_TORONTO}/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 170),),
        185,
    ),
    "cifar100": Offer(
        "cifar-100-binary",
        (Remote(f"{_TORONTO}/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", 169),),
        185,
    ),
    "stl10": Offer(
        "stl10_binary",
        (
            Remote(
                "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz", "91f7769df0f17e558f3565bffb0c7dfb", 2640
            ),
        ),
        3130,
    ),
    "tiny-imagenet": Offer(
        "tiny-imagenet-200",
        (Remote("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de", 248),),
        600,
    ),
    "mnist": Offer(
        "mnist",
        _four(
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    "fashion-mnist": Offer(
        "fashion-mnist",
        _four(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
}

# Sets behind a form, a login or a page that a program cannot use: where they are, and how isofed wants them laid out.
BY_HAND: dict[str, str] = {
    "pacs": "download PACS from https://domaingeneralization.github.io and unpack it as domain/class/picture, with the "
    "domain folders art_painting, cartoon, photo and sketch",
    "office-home": "download Office-Home from https://www.hemanthdv.org/officeHomeDataset.html and unpack it with its "
    "folders Art, Clipart, Product and 'Real World', each with one folder a class",
    "domainnet": "download the six archives of DomainNet, and its train and test lists, from https://ai.bu.edu/M3SDA "
    "and unpack them into one folder: clipart, infograph, painting, quickdraw, real and sketch, with the lists "
    "(clipart_train.txt and so on) beside them",
    "office-caltech10": "get Office-Caltech10 (Gong et al., 2012) from its authors and unpack it as "
    "domain/class/picture, with the domain folders amazon, caltech, dslr and webcam",
    "ham10000": "download HAM10000 from https://doi.org/10.7910/DVN/DBW86T and unpack its two picture archives into "
    "HAM10000_images_part_1 and HAM10000_images_part_2, with the file HAM10000_metadata beside them",
    "imagenet-200": "ask for ImageNet (ILSVRC 2012) at https://image-net.org/download.php and unpack it as "
    "train/class/picture and val/class/picture",
}


def get(name: str, root: Path, tell: Tell | None = None) -> Path:
    """Fetch a data set into a folder in ``root`` and return that folder; what is there already is not fetched again."""
    if name in BY_HAND:
        raise UserError(f"'{name}' must be fetched by hand: {BY_HAND[name]}; then give that folder as root=FOLDER")
    if name not in OFFERS:
        raise unknown("data set to download", name, [*OFFERS, *BY_HAND])
    offer, folder = OFFERS[name], root / OFFERS[name].folder
    try:
        (root if offer.unpacked else folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder {root} cannot be made: {error.strerror}") from None
    with locked(root / f".{name}.lock", f"the download of {name} into {root}"):
        if offer.unpacked:
            if not folder.exists():
                archive = root / offer.files[0].name
                fetch(offer.files[0], archive, tell, room=int(offer.unpacked * 1e6))
                unpack(archive, folder, most=int(2 * offer.unpacked * 1e6))
                archive.unlink()
        else:
            for remote in offer.files:
                fetch(remote, folder / remote.name, tell)
    return folder


def fetch(remote: Remote, place: Path, tell: Tell | None = None, room: int = 0) -> None:
    """Get one file, going on with what an earlier try has left; ``room`` bytes more must be free on the disk."""
    if place.exists() and _md5(place) == remote.md5:
        return
    part, url = place.with_name(place.name + ".part"), _address(remote)
    failures, before = 0, -1
    while True:
        try:
            _continue(url, part, int(10 * remote.megabytes * 1e6), room, tell)
            break
        except urllib.error.HTTPError as error:
            error.close()
            if error.code not in (408, 425, 429) and error.code < 500:
                raise RunError(f"{url} cannot be downloaded: the server answers {error.code} {error.reason}") from None
            why = f"the server answers {error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            why = str(getattr(error, "reason", "") or error) or type(error).__name__
        done = part.stat().st_size if part.exists() else 0
        failures, before = (failures + 1 if done <= before else 1), done
        if failures >= TRIES:
            kept = f"; {done / 1e6:,.1f} MB are kept and the same command goes on from there" if done else ""
            raise RunError(f"{url} cannot be downloaded: {why} ({TRIES} tries){kept}")
        _wait(2.0 ** (failures - 1))
    if _md5(part) != remote.md5:
        part.unlink()
        raise RunError(
            f"{url} is not the file that was published (its MD5 checksum is wrong): it was removed, try again, and if "
            "it happens again look at the publisher's page"
        )
    try:
        os.replace(part, place)
    except OSError as error:
        raise write_error(place, error) from error


def _address(remote: Remote) -> str:
    """The publisher's, or the same file name on ``$ISOFED_MIRROR``; the checksum is the same either way."""
    mirror = os.environ.get("ISOFED_MIRROR")
    return f"{mirror.rstrip('/')}/{remote.name}" if mirror else remote.url


def _wait(seconds: float) -> None:
    time.sleep(seconds)


class _Broken(ConnectionError):
    """The server closed before everything had come."""


def _continue(url: str, part: Path, most: int, room: int, tell: Tell | None) -> None:
    """One connection: append what is missing, or start again where the server does not send parts of a file."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "isofed", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response: Any = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PATIENCE)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise
        error.close()
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return  # everything had come already
        part.unlink()
        raise _Broken("what had been downloaded does not fit the file on the server") from None
    except ValueError:
        raise UserError(f"'{url}' is not an address of a web server") from None
    with response:
        start, total = _extent(response, have)
        if (total or start) > most:
            raise RunError(f"{url} is {(total or start) / 1e6:,.0f} MB, far more than was published: not downloaded")
        _check_room(part, max(0, (total or 0) - start) + room)
        done = start
        with _written(part), part.open("ab") as file:
            file.truncate(start)
            while chunk := _read(response):
                done += len(chunk)
                if done > most:
                    raise RunError(f"{url} sends far more than was published: stopped after {done / 1e6:,.0f} MB")
                file.write(chunk)
                if tell is not None:
                    tell(part.name.removesuffix(".part"), done, total)
        if total is not None and done < total:
            raise _Broken(f"the connection broke after {done / 1e6:,.1f} of {total / 1e6:,.1f} MB")


def _read(response: Any) -> bytes:
    try:
        data: bytes = response.read(_CHUNK)
    except OSError as error:  # of the network, not of the disk
        raise _Broken(str(error) or type(error).__name__) from error
    return data


@contextmanager
def _written(part: Path) -> Iterator[None]:
    """A disk that refuses ends the download, a connection that breaks does not."""
    try:
        yield
    except _Broken:
        raise
    except OSError as error:
        raise write_error(part, error) from error


def _extent(response: Any, have: int) -> tuple[int, int | None]:
    """Where the answer starts in the file, and how long the whole file is, where that is said."""
    if response.status == 206:
        said = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if said is None or int(said[1]) != have:
            raise RunError(f"{response.url} sends another part of the file than was asked for: delete the .part file")
        return have, None if said[2] == "*" else int(said[2])
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if length.isdigit() else None


def _check_room(part: Path, need: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if free < need + _RESERVE:
        raise RunError(
            f"there is no room for {part.name.removesuffix('.part')} in {part.parent}: it needs {need / 1e6:,.0f} MB, "
            f"{free / 1e6:,.0f} MB are free; make room or choose another folder with root="
        )


def _md5(path: Path) -> str:
    """What publishers state; against broken bytes, and a forger could still not make another file with it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
