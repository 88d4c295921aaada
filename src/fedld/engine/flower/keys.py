"""Certificates and keys to begin with: a small authority of one's own, and a key pair a site.

A consortium with a public-key infrastructure uses that instead; Flower wants PEM files either way.
"""

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedld.errors import FedLDError

DAYS = 825
PEM = serialization.Encoding.PEM


def make_certificates(hosts: list[str], folder: Path) -> None:
    """Write ca.crt, server.crt and server.key for a server of these names; the authority's is not kept."""
    _new(folder, "ca.crt", "server.crt", "server.key")
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedld authority")])
    ca = _certificate(name, name, authority, authority, [x509.BasicConstraints(True, 0)])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    certificate = _certificate(subject, name, server, authority, [names, x509.BasicConstraints(False, None)])
    (folder / "ca.crt").write_bytes(ca.public_bytes(PEM))
    (folder / "server.crt").write_bytes(certificate.public_bytes(PEM))
    _write_private(folder / "server.key", server, serialization.PrivateFormat.TraditionalOpenSSL)


def make_site_key(site: str, folder: Path) -> None:
    """Write SITE.key, which never leaves the site, and SITE.pub for the server's operator."""
    _new(folder, f"{site}.key", f"{site}.pub")
    key = ec.generate_private_key(ec.SECP384R1())
    _write_private(folder / f"{site}.key", key, serialization.PrivateFormat.OpenSSH)
    encoding = serialization.Encoding.OpenSSH
    public = key.public_key().public_bytes(encoding, serialization.PublicFormat.OpenSSH)
    (folder / f"{site}.pub").write_bytes(public + b"\n")


def _new(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (folder / name).exists():
            raise FedLDError(f"'{folder / name}' exists and is not overwritten")


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    extensions: list[x509.ExtensionType],
) -> x509.Certificate:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=DAYS))
    for extension in extensions:
        builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
    return builder.sign(signer, hashes.SHA384())


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    """A private key, readable by its owner only from the first moment on."""
    content = key.private_bytes(PEM, form, serialization.NoEncryption())
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
