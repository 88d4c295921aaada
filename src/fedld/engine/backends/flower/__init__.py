"""The same methods on many machines: Flower carries the orders to the sites and their replies back.

wire        what travels, checked on arrival
site        the ClientApp: does the jobs on the site's own data, keeps its state on its own disk
limits      what a site lets a server ask of it
budget      what a site measures for one run
disclosure  which images a site measures, and how exactly it tells the result
sites       who takes part: site names, not Flower's changing node ids
federation  a Federation without pixels for the server, and one with a single client for a site
orders      a site's jobs in one message, its reply checked
backend     the round loop's `Backend` over Flower's grid: quorum, time limits, missing sites
server      the ServerApp
control     what the operator does with a running server
submit      `fedld run --engine flower`
simulation  `fedld run --engine flower-simulation`
launch      server and site with safe defaults
superlink   Flower's SuperLink: one port for sites, everything else behind a door
supernode   Flower's SuperNode without a port
gate        who may pass the sites' port
listener    bounds on connections, and calls that wait for work
door        a Unix socket that only its owner opens
roster      the operator's file of names and keys
grid        replies, bounded before they are unfolded
warm        how Flower's daemons start our apps quickly, and no others
check       `fedld site check`
keys        certificates and keys to begin with
"""

import os
from importlib.metadata import PackageNotFoundError, version

from fedld.errors import FedLDError

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
MADE_FOR = "1.41"
"""The minor version of flwr whose insides the guards were written for."""


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
