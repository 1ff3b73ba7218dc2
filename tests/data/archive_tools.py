"""Archives made in memory, with members of every kind."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def file(name: str, content: bytes = b"content") -> tuple[tarfile.TarInfo, bytes]:
    return tarfile.TarInfo(name), content


def special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, b""


def zip_of(*members: tuple[str | zipfile.ZipInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return out.getvalue()


def a_zip_link(name: str, target: bytes) -> tuple[zipfile.ZipInfo, bytes]:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info, target
