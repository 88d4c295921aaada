"""Every method under its name, as a value with its default options.

Installed packages may add methods: an entry point of the group `fedld.methods` names a `Method` value.
"""

from dataclasses import replace

from fedld.aggregation import Consensus, Measured, Principal
from fedld.local.objectives import MarginLog
from fedld.methods.base import Card, Messages, MessageSum, Method, Replies, Server
from fedld.methods.baselines import Central, FedAvg, Local
from fedld.methods.batchnorm import FedBN, SiloBN
from fedld.methods.by_objective import BalancedSoftmax, FedDecorr, FedLC, FedNTD, FedRS
from fedld.methods.by_rule import FedConsensus, FedGH, PGrad, RobFedAvg
from fedld.methods.ccvr import CCVR
from fedld.methods.ditto import Ditto
from fedld.methods.fedacg import FedACG
from fedld.methods.fedcm import FedCM
from fedld.methods.feddisco import FedDisco
from fedld.methods.feddyn import FedDyn
from fedld.methods.fedexp import FedExP
from fedld.methods.fedga import GeneralisationAdjustment
from fedld.methods.fediir import FedIIR
from fedld.methods.fedld import FedLD
from fedld.methods.fedld_official import FedLDOfficial
from fedld.methods.fedlin import FedLin
from fedld.methods.fedma import FedMA
from fedld.methods.fednova import FedNova
from fedld.methods.fedpac import FedPAC
from fedld.methods.fedprox import FedProx
from fedld.methods.fedrod import FedRoD
from fedld.methods.fedsam import FedSAM
from fedld.methods.fedspeed import FedSpeed
from fedld.methods.fedsr import FedSR
from fedld.methods.gamf import GAMF
from fedld.methods.lda import LDA
from fedld.methods.moon import Moon
from fedld.methods.newton import Newton
from fedld.methods.pfedla import PFedLA
from fedld.methods.regmean import RegMean
from fedld.methods.ridge import Ridge
from fedld.methods.scaffold import Scaffold
from fedld.methods.server_optimisers import FedAdam, FedAvgM, FedYogi
from fedld.registry import Registry, require_instance

METHODS: Registry[Method] = Registry(
    "method",
    {
        "fedavg": FedAvg(),
        "fedprox": FedProx(),
        "fedbn": FedBN(),
        "fedpac": FedPAC(),
        "fedgh": FedGH(),
        "scaffold": Scaffold(),
        "fedcm": FedCM(),
        "fediir": FedIIR(),
        "fedlin": FedLin(),
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
        "feddyn": FedDyn(),
        "fedexp": FedExP(),
        "fedacg": FedACG(),
        "fedntd": FedNTD(),
        "fedlc": FedLC(),
        "balanced-softmax": BalancedSoftmax(),
        "fedrs": FedRS(),
        "feddecorr": FedDecorr(),
        "moon": Moon(),
        "feddisco": FedDisco(),
        "fedga": GeneralisationAdjustment(),
        "fedrod": FedRoD(),
        "ccvr": CCVR(),
        "fedsam": FedSAM(),
        "fedspeed": FedSpeed(),
        "ditto": Ditto(),
        "silobn": SiloBN(),
        "fedld": FedLD(),
        "fedld-official": FedLDOfficial(),
        "fedld-tensor": replace(FedLD(), granularity="tensor"),
        "fedld-smooth": replace(FedLD(), rule=Principal(conflict="smooth")),
        "fedld-drop": replace(FedLD(), rule=Principal(conflict="drop")),
        "fedld-consensus": replace(FedLD(), rule=Consensus()),
        "fedld-measured": replace(FedLD(), objective=MarginLog(lam=0.01), rule=Measured()),
        "fedld-drift": replace(Scaffold(), objective=MarginLog(lam=0.01), rule=Measured()),
        "consensus": FedConsensus(),
        "measured": replace(FedAvg(), rule=Measured()),
        "ridge": Ridge(),
        "lda": LDA(),
        "newton": Newton(),
        "regmean": RegMean(),
        "local": Local(),
        "central": Central(),
    },
    accept=require_instance("method", Method, "or a Method"),
)
METHODS.load_plugins()

__all__ = [
    "METHODS",
    "Card",
    "FedAvg",
    "FedLD",
    "FedProx",
    "MessageSum",
    "Messages",
    "Method",
    "Replies",
    "Server",
]
