"""A renewed certificate is one that sites already trust."""

import ssl
import stat

import pytest
from cryptography import x509
from typer.testing import CliRunner

from fedld.cli.site import server
from fedld.deployment import keys
from fedld.deployment.keys import make_certificates, renew_certificate
from fedld.errors import FedLDError


def trusted(ca, folder, host):
    """Whether somebody who has ca.crt accepts this server under this name: a handshake in memory."""
    client, own = ssl.create_default_context(cafile=ca), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(folder / "server.crt", folder / "server.key")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there, server_hostname=host), own.wrap_bio(there, back, server_side=True)
    for _ in range(3):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
    return ends[0].cipher() is not None


def test_sites_trust_the_renewed_certificate(tmp_path):
    make_certificates(["localhost", "127.0.0.1"], tmp_path)
    sites = tmp_path / "at-the-site.crt"
    sites.write_bytes((tmp_path / "ca.crt").read_bytes())
    before = (tmp_path / "server.crt").read_bytes(), (tmp_path / "server.key").read_bytes()
    assert trusted(sites, tmp_path, "localhost")
    apart = tmp_path / "apart" / "ca.key"
    apart.parent.mkdir()
    (tmp_path / "ca.key").rename(apart)
    words = ["certificates", "--renew", "--out", str(tmp_path), "--ca-key", str(apart)]
    result = CliRunner().invoke(server, words)
    assert result.exit_code == 0, result.output
    assert before[0] != (tmp_path / "server.crt").read_bytes()
    assert before[1] != (tmp_path / "server.key").read_bytes()
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600
    assert trusted(sites, tmp_path, "localhost")
    assert trusted(sites, tmp_path, "127.0.0.1")
    assert not trusted(sites, tmp_path, "elsewhere.org")
    renew_certificate(["elsewhere.org"], tmp_path, apart)
    assert trusted(sites, tmp_path, "elsewhere.org")
    assert not trusted(sites, tmp_path, "localhost")
    assert {file.name for file in tmp_path.iterdir()} == {
        *("ca.crt", "server.crt", "server.key", "apart", "at-the-site.crt")
    }


def test_keys_of_authorities_are_private(tmp_path):
    make_certificates(["localhost"], tmp_path)
    assert stat.S_IMODE((tmp_path / "ca.key").stat().st_mode) == 0o600


def test_a_certificate_never_outlives_its_authority(tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "AUTHORITY_DAYS", 10)
    make_certificates(["localhost"], tmp_path)
    ca, own = (x509.load_pem_x509_certificate((tmp_path / f"{n}.crt").read_bytes()) for n in ("ca", "server"))
    assert own.not_valid_after_utc == ca.not_valid_after_utc == renew_certificate([], tmp_path)


def test_bad_input_leaves_everything_as_it_was(tmp_path, monkeypatch):
    make_certificates(["localhost"], tmp_path / "one")
    make_certificates(["localhost"], tmp_path / "two")
    before = {file: file.read_bytes() for file in (tmp_path / "one").iterdir()}
    junk = tmp_path / "junk"
    junk.write_text("no key")
    for key, sentence in (
        (tmp_path / "two" / "ca.key", "is not the key of"),
        (junk, "is no private key"),
        (tmp_path / "none", "cannot be read"),
    ):
        with pytest.raises(FedLDError, match=sentence):
            renew_certificate([], tmp_path / "one", key)
    with pytest.raises(FedLDError, match=r"no address and no host name"):
        renew_certificate(["é"], tmp_path / "one")
    with pytest.raises(FedLDError, match="name the server"):
        make_certificates([], tmp_path / "three")
    assert {file: file.read_bytes() for file in (tmp_path / "one").iterdir()} == before
    monkeypatch.setattr(keys, "AUTHORITY_DAYS", 0)
    make_certificates(["localhost"], tmp_path / "old")
    with pytest.raises(FedLDError, match="has expired"):
        renew_certificate([], tmp_path / "old")
