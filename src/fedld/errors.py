"""The one error a user meets: a sentence that names the thing that is wrong."""

from collections.abc import Iterable


class FedLDError(Exception):
    """Say in one sentence what is wrong with an input or a request.

    The command line prints the sentence and exits with code 2.

    >>> import fedld
    >>> fedld.run("fedpox", "digits")
    Traceback (most recent call last):
        ...
    fedld.errors.FedLDError: unknown method 'fedpox': did you mean 'fedprox'?
    """


class Interrupted(FedLDError):  # noqa: N818 (not an error of anybody's)
    """Ctrl-C: the last finished round is on disk."""


def printable(text: str, longest: int = 500) -> str:
    """Make a peer's text safe for terminals and files: shortened, without control characters.

    >>> printable("red \\x1b[31m\\nalert" + "!" * 20, 18)
    'red \\\\x1b[31m\\\\naler...'
    """
    cut = text if len(text) <= longest else text[:longest] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> FedLDError:
    """Make the error about a name that stands for nothing: the nearest valid name, or all of them.

    >>> str(unknown_name("method", "fedpox", ["fedavg", "fedprox"]))
    "unknown method 'fedpox': did you mean 'fedprox'?"
    """
    return FedLDError(f"unknown {kind} '{name}': {nearest(name, list(valid))}")


def nearest(name: str, valid: list[str]) -> str:
    """Suggest the nearest valid name, as part of a sentence.

    >>> nearest("fedpox", ["fedavg", "fedprox"])
    "did you mean 'fedprox'?"
    >>> nearest("zzz", ["fedavg", "fedprox"])
    'valid names: fedavg, fedprox'
    """
    from difflib import get_close_matches

    close = get_close_matches(name, valid, n=1)
    return f"did you mean '{close[0]}'?" if close else f"valid names: {', '.join(sorted(valid))}"
