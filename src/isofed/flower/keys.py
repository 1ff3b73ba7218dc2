"""Certificates and keys of a deployment, and where they lie.

::

    keys/
      ca.crt                   every site gets this file, and trusts the server by it
      ca.key                   signs the server's certificate; keep it offline
      server.crt, server.key   stay on the server's machine
      control.token            whoever has it may register sites, and start and stop runs
      executor.secret          of the processes on the server's machine among themselves
      sites/clinic.key         a site's private key: stays at the site
      sites/clinic.pub         its public half, by which the server knows it

Nothing that is secret can be read by other users of a machine.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from isofed.errors import UserError

YEARS = 5
_SECRET, _PUBLIC = 0o600, 0o644


@dataclass(frozen=True)
class Keys:
    """The folder with keys; see the module."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def certificate(self) -> Path:
        return self.folder / "server.crt"

    @property
    def private(self) -> Path:
        return self.folder / "server.key"

    @property
    def token(self) -> Path:
        return self.folder / "control.token"

    @property
    def secret(self) -> Path:
        return self.folder / "executor.secret"

    def site(self, name: str) -> Path:
        """The private key of a site; its public key lies beside it."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise UserError(f"a site cannot be called '{name}'; use letters, digits, '.', '_' and '-'")
        return self.folder / "sites" / f"{name}.key"

    def public(self) -> list[Path]:
        """The public keys of all sites."""
        return sorted((self.folder / "sites").glob("*.pub"))

    def check_server(self) -> None:
        """Say what is missing to start a server."""
        for path in (self.ca, self.certificate, self.private, self.token, self.secret):
            if not path.is_file():
                raise UserError(f"there is no {path}; make keys first with `isofed flower keys`")


def make_server_keys(folder: Path, hosts: Sequence[str] = ()) -> Keys:
    """A certificate authority, the server's certificate for these names and addresses, and its secrets.

    What is there stays as it is, so that sites which have the authority's certificate keep trusting the server.
    """
    keys = Keys(folder)
    _private_folder(folder)
    if keys.certificate.exists():
        return keys
    authority = _own_key(folder / "ca.key")
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "isofed federation")])
    usage = x509.KeyUsage(
        False, False, False, False, False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False
    )
    root = (
        _certificate(name, name, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    _write(keys.ca, root.public_bytes(serialization.Encoding.PEM), _PUBLIC)
    own = _own_key(keys.private)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0] if hosts else "localhost")])
    made = (
        _certificate(subject, name, own.public_key())
        .add_extension(x509.SubjectAlternativeName([_general(h) for h in ("localhost", "127.0.0.1", *hosts)]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    _write(keys.token, secrets.token_urlsafe(32).encode(), _SECRET)
    _write(keys.secret, secrets.token_bytes(32), _SECRET)
    _write(keys.certificate, made.public_bytes(serialization.Encoding.PEM), _PUBLIC)  # last: with it, all is there
    return keys


def make_site_key(folder: Path, name: str) -> Path:
    """A key pair for a site, best made at the site itself; gives the private key's path. One that is there stays."""
    path = Keys(folder).site(name)
    _private_folder(path.parent)
    public = path.with_suffix(".pub")
    if path.exists() and public.exists():
        return path
    key = ec.generate_private_key(ec.SECP384R1())
    form, none = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    _write(path, key.private_bytes(serialization.Encoding.PEM, form, none), _SECRET)
    text = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(public, text + f" {name}\n".encode(), _PUBLIC)
    return path


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
    )


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _own_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = ec.generate_private_key(ec.SECP256R1())
    form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    _write(path, key.private_bytes(serialization.Encoding.PEM, form, none), _SECRET)
    return key


def _private_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}") from error


def write_secret(path: Path, data: bytes) -> None:
    """A file for this user alone."""
    _write(path, data, _SECRET)


def _write(path: Path, data: bytes, mode: int) -> None:
    """A file that nobody else could read even for a moment, where that is asked for."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(data)
