"""The one error a user meets: a sentence that names the thing that is wrong."""


class FedLDError(Exception):
    """Bad input or an impossible request; the command line prints it and exits with code 2."""


def nearest(name: str, valid: list[str]) -> str:
    """Sentence part that offers the nearest valid name.

    >>> nearest("fedpox", ["fedavg", "fedprox"])
    "did you mean 'fedprox'?"
    >>> nearest("zzz", ["fedavg", "fedprox"])
    'valid names: fedavg, fedprox'
    """
    from difflib import get_close_matches

    close = get_close_matches(name, valid, n=1)
    return f"did you mean '{close[0]}'?" if close else f"valid names: {', '.join(sorted(valid))}"
