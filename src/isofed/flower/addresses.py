"""Addresses and ports: what a user gives, what this machine has, and why a server cannot be reached."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import MutableMapping
from contextlib import closing
from pathlib import Path

from isofed.errors import UserError

_HERE = ("127.0.0.1", "localhost", "::1")


def split(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``; an IPv6 address stands in brackets."""
    host, _, port = address.rpartition(":")
    named = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    proper = named and not set(named) & set("/[] @") and (":" not in named or named != host)
    if not (proper and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise UserError(
            f"'{address}' is not the address of a server; give host:port, such as federation.example.org:8000"
        )
    return named, int(port)


def joined(host: str, port: int) -> str:
    """``host:port``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def near(host: str) -> str:
    """Where this machine reaches a server of its own that listens on an address."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def check_free(host: str, port: int) -> None:
    """Say so if no server can listen there. Otherwise the one that does would be taken for ours."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server itself does
            probe.bind(where)
            probe.listen()
    except socket.gaierror:
        raise UserError(f"there is no address '{host}' to listen on; 0.0.0.0 stands for all of this machine") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} is in use by another program; choose another one with --port") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise UserError(f"{host} is no address of this machine; 0.0.0.0 stands for all of them") from None
        raise UserError(f"cannot listen on {joined(host, port)}: {error.strerror}") from None


def around_proxy(environment: MutableMapping[str, str]) -> None:
    """Let programs with these variables reach this machine directly, also where a proxy leads to the world."""
    given = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    names = [name.strip() for name in given.split(",") if name.strip()]
    if "*" not in names:
        environment["no_proxy"] = ",".join([*names, *(name for name in _HERE if name not in names)])


def why_not(server: str, ca: Path | None) -> str:
    """Why a site cannot connect, as far as its machine can see."""
    host, port = split(server)
    try:
        with socket.create_connection((host, port), timeout=5) as plain:
            if ca is not None:
                ssl.create_default_context(cafile=os.fspath(ca)).wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        return (
            f"the certificate of {server} does not hold ({error.verify_message}): keys/ca.crt must be the one of this "
            "server, whose certificate must name that host (`isofed flower keys --host`)"
        )
    except socket.gaierror:
        return f"there is no host '{host}'"
    except OSError as error:
        return f"no server answers at {server} ({error.strerror or error})"
    return (
        f"the server at {server} does not let it in: its key may not be registered yet (`isofed flower start` does "
        "so), its last connection may still count, for a minute, or its clock may be more than 5 s ahead"
    )
