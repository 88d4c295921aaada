"""Certificates and keys to begin with: a small authority of one's own, and a key pair a site.

A consortium with a public-key infrastructure uses that instead; Flower wants PEM files either way.
"""

import ipaddress
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from fedld.engine.backends.flower.wire import site_name
from fedld.errors import FedLDError
from fedld.privacy.context import public_key
from fedld.privacy.peers import peers_text

DAYS = 825
AUTHORITY_DAYS = 3650
AUTHORITY = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedld authority")])
PEM = serialization.Encoding.PEM
OPENSSL = serialization.PrivateFormat.TraditionalOpenSSL
Key = ec.EllipticCurvePrivateKey


def make_certificates(hosts: list[str], folder: Path) -> None:
    """Write ca.crt and server.crt with their keys, for a server of these names.

    ca.key is for the operator to keep apart: with it a new certificate is one that sites already trust.
    """
    if not hosts:
        raise FedLDError("name the server: --host, once for every name or address")
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    _new(folder, "ca.crt", "ca.key", "server.crt", "server.key")
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    until = datetime.now(UTC) + timedelta(days=AUTHORITY_DAYS)
    ca = _certificate(AUTHORITY, authority, authority, until, extensions=[x509.BasicConstraints(True, 0)])
    (folder / "ca.crt").write_bytes(ca.public_bytes(PEM))
    _write_private(folder / "ca.key", authority, OPENSSL)
    (folder / "server.crt").write_bytes(_for_server(names, server, authority, ca).public_bytes(PEM))
    _write_private(folder / "server.key", server, OPENSSL)


def renew_certificate(hosts: list[str], folder: Path, authority_key: Path | None = None) -> datetime:
    """Write a new server.crt and server.key by the same authority; gives the end of their validity.

    Without hosts the names of the old certificate are kept. The old files stay until the new ones are whole.
    """
    ca = _read_certificate(folder / "ca.crt")
    authority = _read_key(authority_key or folder / "ca.key")
    if ca.public_key() != authority.public_key():
        raise FedLDError(f"'{authority_key or folder / 'ca.key'}' is not the key of '{folder / 'ca.crt'}'")
    if ca.not_valid_after_utc <= datetime.now(UTC):
        raise FedLDError(
            f"'{folder / 'ca.crt'}' has expired: make new certificates, and send ca.crt to all sites"
        )
    if hosts:
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    else:
        names = _names(folder / "server.crt")
    server = ec.generate_private_key(ec.SECP384R1())
    certificate = _for_server(names, server, authority, ca)
    try:
        for name in ("server.crt.new", "server.key.new"):
            (folder / name).unlink(missing_ok=True)
        _write_private(folder / "server.key.new", server, OPENSSL)
        (folder / "server.crt.new").write_bytes(certificate.public_bytes(PEM))
        for name in ("server.key", "server.crt"):
            os.replace(folder / f"{name}.new", folder / name)
    except OSError as error:
        raise FedLDError(f"cannot write to '{folder}': {error.strerror}") from None
    return certificate.not_valid_after_utc


def _for_server(
    names: x509.SubjectAlternativeName, server: Key, authority: Key, ca: x509.Certificate
) -> x509.Certificate:
    """Make the server's certificate, which expires no later than its authority's."""
    until = min(datetime.now(UTC) + timedelta(days=DAYS), ca.not_valid_after_utc)
    first = str(next(iter(names)).value)[:64]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, first)])
    return _certificate(
        subject,
        server,
        authority,
        until,
        extensions=[names, x509.BasicConstraints(False, None)],
        issuer=ca.subject,
    )


def _names(file: Path) -> x509.SubjectAlternativeName:
    try:
        return _read_certificate(file).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise FedLDError(f"'{file}' has no names: give them with --host") from None


def _read_certificate(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except OSError as error:
        raise FedLDError(f"'{file}' cannot be read: {error.strerror}") from None
    except ValueError:
        raise FedLDError(f"'{file}' is no certificate (PEM)") from None


def _read_key(file: Path) -> Key:
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), None)
    except OSError as error:
        raise FedLDError(f"the authority's key '{file}' cannot be read: {error.strerror}") from None
    except (ValueError, TypeError):
        raise FedLDError(f"'{file}' is no private key (PEM, without a password)") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedLDError(
            f"'{file}' is of another kind than fedld makes: renew with your authority's own tools"
        )
    return key


def make_site_key(site: str, folder: Path) -> None:
    """Write SITE.key, which never leaves the site, and SITE.pub for the server's operator."""
    site_name(site)
    _new(folder, f"{site}.key", f"{site}.pub")
    key = ec.generate_private_key(ec.SECP384R1())
    _write_private(folder / f"{site}.key", key, serialization.PrivateFormat.OpenSSH)
    encoding = serialization.Encoding.OpenSSH
    public = key.public_key().public_bytes(encoding, serialization.PublicFormat.OpenSSH)
    (folder / f"{site}.pub").write_bytes(public + b"\n")


def make_peer_key(site: str, folder: Path) -> None:
    """Write SITE.peer.key, which never leaves the site, and SITE.peer.toml for its peers."""
    site_name(site)
    _new(folder, f"{site}.peer.key", f"{site}.peer.toml")
    key = Ed25519PrivateKey.generate()
    _write_private(folder / f"{site}.peer.key", key, serialization.PrivateFormat.OpenSSH)
    (folder / f"{site}.peer.toml").write_text(peers_text({site: public_key(key)}), encoding="utf-8")


def _new(folder: Path, *names: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedLDError(f"cannot make the folder '{folder}': {error.strerror}") from None
    for name in names:
        if (folder / name).exists():
            raise FedLDError(f"'{folder / name}' exists and is not overwritten")


def _certificate(
    subject: x509.Name,
    key: Key,
    signer: Key,
    until: datetime,
    extensions: list[x509.ExtensionType],
    issuer: x509.Name = AUTHORITY,
) -> x509.Certificate:
    since = datetime.now(UTC) - timedelta(hours=1)
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(since).not_valid_after(until)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
    return builder.sign(signer, hashes.SHA384())


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not host.isascii() or not re.fullmatch(r"[A-Za-z0-9*._-]{1,253}", host):
            raise FedLDError(f"'{host}' is no address and no host name (write names in ASCII)") from None
        return x509.DNSName(host)


def _write_private(path: Path, key: Key | Ed25519PrivateKey, form: serialization.PrivateFormat) -> None:
    """Write a private key that only its owner can read, from the first moment on."""
    content = key.private_bytes(PEM, form, serialization.NoEncryption())
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
    except OSError as error:
        raise FedLDError(f"cannot write '{path}': {error.strerror}") from None
