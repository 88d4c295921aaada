"""The same methods on many machines: Flower carries the orders to the sites and their replies back.

wire        what travels, checked on arrival
site        the ClientApp: does the jobs on the site's own data, keeps its state on its own disk
sites       who takes part: site names, not Flower's changing node ids
federation  a Federation without pixels for the server, and one with a single client for a site
orders      a site's jobs in one message, its reply checked
backend     the round loop's `Backend` over Flower's grid: quorum, time limits, missing sites
server      the ServerApp
submit      `fedld run --engine flower`
simulation  `fedld run --engine flower-simulation`
launch      SuperLink and SuperNode with safe defaults
warm        how they start our apps quickly, and no others
check       `fedld site check`
keys        certificates and keys to begin with
"""

import os
from importlib.util import find_spec

from fedld.errors import FedLDError

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}

if find_spec("flwr") is None:
    raise FedLDError("Flower is not installed here: pip install 'fedld[flower]'")
os.environ.update(QUIET)
