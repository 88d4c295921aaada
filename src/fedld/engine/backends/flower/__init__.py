"""The same methods on many machines: Flower carries the orders to the sites and their replies back.

wire        what travels, checked on arrival
site        the ClientApp: does the jobs on the site's own data, keeps its state on its own disk
limits      what a site lets a server ask of it
budget      what a site measures for one run
disclosure  which images a site measures, and how exactly it tells the result
secure_site, secure_server   secure sums: results that stay at sites, and the messages about them
sites       who takes part: site names, not Flower's changing node ids
federation  a Federation without pixels for the server, and one with a single client for a site
orders      a site's jobs in one message, its reply checked
backend     the round loop's `Backend` over Flower's grid: quorum, time limits, missing sites
internals   every place that reaches into flwr
engine      the sites as an engine of the round loop
simulation  `fedld run --engine flower-simulation`
check       `fedld site check`

Starting, admitting and supervising server and sites is in `fedld.deployment`.
"""

import os
from importlib.metadata import PackageNotFoundError, version

from fedld.engine.backends.flower.internals import MADE_FOR
from fedld.errors import FedLDError

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def check_flower(found: str | None) -> None:
    """Refuse a Flower that is not there, or one that the guards were not written for."""
    if found is None:
        raise FedLDError("Flower is not installed here: pip install 'fedld[flower]'")
    if found.split(".")[:2] != MADE_FOR.split("."):
        raise FedLDError(
            f"flwr {found} is installed, but fedld's guards were written for flwr {MADE_FOR}: "
            "pip install 'fedld[flower]'"
        )


def _installed() -> str | None:
    try:
        return version("flwr")
    except PackageNotFoundError:
        return None


check_flower(_installed())
os.environ.update(QUIET)
