"""Paths that people give."""

import errno
import os
from pathlib import Path

from fedld.errors import FedLDError


def user_path(typed: str | Path) -> Path:
    """Expand `~` in a path; an invalid path raises an error.

    >>> user_path("a\\0b")
    Traceback (most recent call last):
    fedld.errors.FedLDError: 'a?b' is no path: it holds a character that no path has
    """
    text = str(typed)
    printable = "".join(
        c if c.isprintable() else "?" for c in (text if len(text) < 200 else f"{text[:200]}...")
    )
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise FedLDError(f"'{printable}' is no path: it holds a character that no path has")
    try:
        path = Path(text).expanduser()
        path.exists()
    except RuntimeError:
        raise FedLDError(f"'{printable}' begins with a user that this machine does not know") from None
    except OSError as error:
        raise FedLDError(f"'{printable}' cannot be used: {error.strerror}") from None
    return path


def make_folder(folder: Path) -> None:
    """Make a folder to write to, with its parents; one that is there already stays."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedLDError(f"cannot write to '{folder}': {error.strerror}") from None


def absolute(typed: str) -> str:
    """Make a path absolute, with `~` kept for the reader; empty stays empty.

    >>> absolute("/data"), absolute("~/data"), absolute("")
    ('/data', '~/data', '')
    """
    return typed if not typed or typed.startswith("~") else os.path.abspath(typed)


def require_regular(path: Path) -> None:
    """Raise OSError unless a path is a plain file: a pipe or a device never ends."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def cache_root(cache: Path | None = None) -> Path:
    """Choose `cache`, else $FEDLD_CACHE, else ~/.cache/fedld; created if absent."""
    root = cache or Path(os.environ.get("FEDLD_CACHE") or Path.home() / ".cache" / "fedld")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedLDError(
            f"The cache folder {root} cannot be made ({error.strerror}); set FEDLD_CACHE"
        ) from error
    return root.resolve()


def cache_size() -> int:
    """Count the bytes of all files in the cache."""
    return sum(path.stat().st_size for path in cache_root().rglob("*") if path.is_file())
