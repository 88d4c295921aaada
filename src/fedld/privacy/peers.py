"""Who a site trusts in secure computations: its own long-lived key, and the pinned keys of its peers.

Every site has an Ed25519 key of its own and the public keys of all sites in `peers.toml`. The consortium
assembles that file from the sites' public halves and compares its fingerprint by another way than the server.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from fedld.errors import FedLDError
from fedld.privacy.context import digest, pinned, public_key, read_peers

PEERS = "peers.toml"
"""The site's copy of the pinned keys, in its own folder of states."""


@dataclass(frozen=True, kw_only=True)
class Peers:
    """A site's own key and the pinned keys of all sites.

    Args:
        site: this site's name.
        identity: its private key.
        keys: public keys (Ed25519, hexadecimal) by site, its own among them.
    """

    site: str
    identity: Ed25519PrivateKey = field(repr=False)
    keys: Mapping[str, str]

    def __post_init__(self) -> None:
        if self.keys.get(self.site) != public_key(self.identity):
            raise FedLDError(
                f"peers.toml does not have the key of '{self.site}' itself: the consortium's file was made "
                "with another key or name"
            )

    def participants(self, sites: Iterable[str]) -> dict[str, str]:
        """Give the pinned keys of a computation's sites.

        Raises:
            FedLDError: a site is named twice, has no pinned key, or this site is not among them.
        """
        names = list(sites)
        if self.site not in names:
            raise FedLDError(f"'{self.site}' is not a participant of this secure computation")
        return pinned(self.keys, names)


def open_peers(site: str, key_file: Path, peers_file: Path) -> Peers:
    """Read a site's own key and its pinned keys.

    Args:
        site: this site's name.
        key_file: its private key, as `fedld site peer-key` writes it.
        peers_file: the pinned keys.

    Raises:
        FedLDError: a file cannot be read, or the pinned keys are not those of a consortium with this site.
    """
    return Peers(site=site, identity=read_identity(key_file), keys=read_peers(peers_file))


def read_identity(file: Path) -> Ed25519PrivateKey:
    """Read a site's long-lived private key.

    Raises:
        FedLDError: the file cannot be read or holds another kind of key.
    """
    try:
        key = load_ssh_private_key(file.read_bytes(), None)
    except OSError as error:
        raise FedLDError(f"the peer key '{file}' cannot be read: {error.strerror}") from None
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise FedLDError(f"'{file}' is no peer key: make one with `fedld site peer-key`")
    return key


def merged_peers(files: Iterable[Path]) -> dict[str, str]:
    """Merge the sites' public keys into one list.

    Args:
        files: each with a table `[peers]`; a site's own file has one line.

    Returns:
        Keys by site, sorted.

    Raises:
        FedLDError: a site or a key is there twice.
    """
    merged: dict[str, str] = {}
    for file in files:
        for site, key in read_peers(file).items():
            if merged.get(site, key) != key:
                raise FedLDError(f"'{file}' has another key for site '{site}' than a file before it")
            merged[site] = key
    if len(set(merged.values())) < len(merged):
        raise FedLDError("two sites have the same key: each makes one of its own")
    return dict(sorted(merged.items()))


def fingerprint(peers: Mapping[str, str]) -> str:
    """Give the number by which people compare two lists of keys: 128 bits in groups of four digits.

    >>> fingerprint({"a": "00", "b": "01"}) == fingerprint({"b": "01", "a": "00"})
    True
    """
    parts = [part for site in sorted(peers) for part in (site, peers[site])]
    text = digest("peers", *parts)[:32]
    return " ".join(text[k : k + 4] for k in range(0, 32, 4))


def peers_text(peers: Mapping[str, str]) -> str:
    """Write a list of keys as `peers.toml`."""
    lines = [f'"{site}" = "{key}"' for site, key in sorted(peers.items())]
    return "\n".join(["[peers]", *lines, ""])


def peers_lines(peers: Mapping[str, str]) -> list[str]:
    """Describe pinned keys for a reader."""
    return [
        f"pinned keys for secure rounds: {len(peers)} sites ({', '.join(sorted(peers))})",
        f"fingerprint, to be compared with the other sites': {fingerprint(peers)}",
    ]
