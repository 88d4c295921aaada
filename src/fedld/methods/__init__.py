"""Every method under its name, as a value with its default options.

Installed packages may add methods: an entry point of the group `fedld.methods` names a `Method` value.
"""

from dataclasses import replace
from importlib.metadata import entry_points

from fedld.aggregation import Consensus as ConsensusRule
from fedld.aggregation import Principal
from fedld.methods.base import Card, Method, Replies, Server
from fedld.methods.central import Central
from fedld.methods.consensus import Consensus
from fedld.methods.fedadam import FedAdam
from fedld.methods.fedavg import FedAvg
from fedld.methods.fedavgm import FedAvgM
from fedld.methods.fedbn import FedBN
from fedld.methods.fedcm import FedCM
from fedld.methods.fedgh import FedGH
from fedld.methods.fediir import FedIIR
from fedld.methods.fedld import FedLD
from fedld.methods.fedld_official import FedLDOfficial
from fedld.methods.fedma import FedMA
from fedld.methods.fednova import FedNova
from fedld.methods.fedpac import FedPAC
from fedld.methods.fedprox import FedProx
from fedld.methods.fedsr import FedSR
from fedld.methods.fedyogi import FedYogi
from fedld.methods.gamf import GAMF
from fedld.methods.local import Local
from fedld.methods.pfedla import PFedLA
from fedld.methods.pgrad import PGrad
from fedld.methods.robfedavg import RobFedAvg
from fedld.methods.scaffold import Scaffold

METHODS: dict[str, Method] = {
    "fedavg": FedAvg(),
    "fedprox": FedProx(),
    "fedbn": FedBN(),
    "fedpac": FedPAC(),
    "fedgh": FedGH(),
    "scaffold": Scaffold(),
    "fedcm": FedCM(),
    "fediir": FedIIR(),
    "fedsr": FedSR(),
    "fedma": FedMA(),
    "gamf": GAMF(),
    "pfedla": PFedLA(),
    "robfedavg": RobFedAvg(),
    "pgrad": PGrad(),
    "fednova": FedNova(),
    "fedavgm": FedAvgM(),
    "fedadam": FedAdam(),
    "fedyogi": FedYogi(),
    "fedld": FedLD(),
    "fedld-official": FedLDOfficial(),
    "fedld-tensor": replace(FedLD(), granularity="tensor"),
    "fedld-smooth": replace(FedLD(), rule=Principal(conflict="smooth")),
    "fedld-drop": replace(FedLD(), rule=Principal(conflict="drop")),
    "fedld-consensus": replace(FedLD(), rule=ConsensusRule()),
    "consensus": Consensus(),
    "local": Local(),
    "central": Central(),
}
METHODS |= {entry.name: entry.load() for entry in entry_points(group="fedld.methods")}

__all__ = ["METHODS", "Card", "FedAvg", "FedLD", "FedProx", "Method", "Replies", "Server"]
