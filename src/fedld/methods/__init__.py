"""Every method under its name, as a value with its default options.

Installed packages may add methods: an entry point of the group `fedld.methods` names a `Method` value.
"""

from dataclasses import replace

from fedld.aggregation import Consensus, Measured, Principal
from fedld.local.objectives import MarginLog
from fedld.methods.averaging import FedDisco, FedExP, FedNova, GeneralisationAdjustment
from fedld.methods.base import Card, Messages, MessageSum, Method, Replies, Server
from fedld.methods.baselines import Central, FedAvg, Local
from fedld.methods.batchnorm import FedBN, SiloBN
from fedld.methods.by_objective import BalancedSoftmax, FedDecorr, FedLC, FedNTD, FedRS
from fedld.methods.by_rule import FedConsensus, FedGH, PGrad, RobFedAvg
from fedld.methods.ccvr import CCVR
from fedld.methods.feddyn import FedDyn
from fedld.methods.fediir import FedIIR
from fedld.methods.fedld import FedLD, FedLDOfficial
from fedld.methods.fedlin import FedLin
from fedld.methods.fedpac import FedPAC
from fedld.methods.fedprox import FedProx
from fedld.methods.lda import LDA
from fedld.methods.matching import GAMF, FedMA
from fedld.methods.momentum import FedACG, FedCM
from fedld.methods.newton import Newton
from fedld.methods.personal import Ditto, FedRoD, PFedLA
from fedld.methods.regmean import RegMean
from fedld.methods.representation import FedSR, Moon
from fedld.methods.ridge import Ridge
from fedld.methods.scaffold import Scaffold
from fedld.methods.server_optimisers import FedAdam, FedAvgM, FedYogi
from fedld.methods.sharpness import FedSAM, FedSpeed
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
