"""Every method under its name, as a value with its default options."""

from fedld.methods.base import Card, Method, Replies, Server
from fedld.methods.central import Central
from fedld.methods.fedadam import FedAdam
from fedld.methods.fedavg import FedAvg
from fedld.methods.fedavgm import FedAvgM
from fedld.methods.fedbn import FedBN
from fedld.methods.fedcm import FedCM
from fedld.methods.fediir import FedIIR
from fedld.methods.fedld import FedLD
from fedld.methods.fednova import FedNova
from fedld.methods.fedpac import FedPAC
from fedld.methods.fedprox import FedProx
from fedld.methods.fedsr import FedSR
from fedld.methods.fedyogi import FedYogi
from fedld.methods.local import Local
from fedld.methods.pfedla import PFedLA
from fedld.methods.scaffold import Scaffold

METHODS: dict[str, Method] = {
    "fedavg": FedAvg(),
    "fedprox": FedProx(),
    "fedbn": FedBN(),
    "fedpac": FedPAC(),
    "scaffold": Scaffold(),
    "fedcm": FedCM(),
    "fediir": FedIIR(),
    "fedsr": FedSR(),
    "pfedla": PFedLA(),
    "fednova": FedNova(),
    "fedavgm": FedAvgM(),
    "fedadam": FedAdam(),
    "fedyogi": FedYogi(),
    "fedld": FedLD(),
    "local": Local(),
    "central": Central(),
}

__all__ = ["METHODS", "Card", "FedAvg", "FedLD", "FedProx", "Method", "Replies", "Server"]
