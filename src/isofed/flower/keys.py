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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from isofed.errors import UserError

YEARS = 5
_SECRET, _PUBLIC = 0o600, 0o644
_USES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)
_ISSUER = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "isofed federation")])


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

    What is there stays as it is, so that sites which have the authority's certificate keep trusting the server; but
    where hosts are given, the same authority signs a new certificate for them.
    """
    names = [_general(host) for host in dict.fromkeys(("localhost", "127.0.0.1", "::1", *hosts))]
    keys = Keys(folder)
    private_folder(folder)
    if keys.certificate.exists() and not hosts:
        return keys
    authority = _authority(keys)
    own = _own_key(keys.private)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
    made = (
        _certificate(name, _ISSUER, own.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    for path, secret in ((keys.token, secrets.token_urlsafe(32).encode()), (keys.secret, secrets.token_bytes(32))):
        if not path.exists():
            _write(path, secret, _SECRET)
    _write(keys.certificate, made.public_bytes(serialization.Encoding.PEM), _PUBLIC)  # last: with it, all is there
    return keys


def _authority(keys: Keys) -> ec.EllipticCurvePrivateKey:
    """The key that signs; a new one where there is none and no site can have its certificate."""
    path = keys.folder / "ca.key"
    if keys.ca.exists() and not path.exists():
        raise UserError(f"{path}, which made {keys.ca}, is not there: put it back to sign with it")
    key = _own_key(path)
    if not keys.ca.exists():
        uses = dict.fromkeys(_USES, False) | {"key_cert_sign": True, "crl_sign": True}
        root = (
            _certificate(_ISSUER, _ISSUER, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.KeyUsage(**uses), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        _write(keys.ca, root.public_bytes(serialization.Encoding.PEM), _PUBLIC)
    return key


def make_site_key(folder: Path, name: str) -> Path:
    """A key pair for a site, best made at the site itself; gives the private key's path. One that is there stays."""
    path = Keys(folder).site(name)
    private_folder(path.parent)
    public = path.with_suffix(".pub")
    if path.exists():  # its public half may have been moved away, and is made from it again
        key = _load(path, serialization.load_ssh_private_key)
    else:
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
        pass
    try:
        name = host.encode("idna").decode("ascii")
    except UnicodeError:
        name = ""
    if not re.fullmatch(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?", name):
        raise UserError(f"'{host}' is not a name or an address of a host, without port: federation.example.org")
    return x509.DNSName(name)


def _load(path: Path, read: Callable[[bytes, None], object]) -> ec.EllipticCurvePrivateKey:
    try:
        key = read(path.read_bytes(), None)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path} is not a key that `isofed flower keys` made; remove it to have a new one")
    return key


def _own_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A key in a file; the one that is there, if there is one."""
    if path.exists():
        return _load(path, serialization.load_pem_private_key)
    key = ec.generate_private_key(ec.SECP256R1())
    form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    _write(path, key.private_bytes(serialization.Encoding.PEM, form, none), _SECRET)
    return key


def private_folder(folder: Path) -> None:
    """A folder that other users of the machine cannot look into, if it is not there yet."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}") from error


def write_secret(path: Path, data: bytes) -> None:
    """A file for this user alone."""
    _write(path, data, _SECRET)


def _write(path: Path, data: bytes, mode: int) -> None:
    """A file that nobody else could read even for a moment, where that is asked for."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, mode), "wb") as file:
            os.fchmod(file.fileno(), mode)  # of a file that was there before, too
            file.truncate()
            file.write(data)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
