"""Every method under its name, as a value with its default options."""

from fedld.methods.base import Card, Method, Replies, Server
from fedld.methods.fedavg import FedAvg
from fedld.methods.fedld import FedLD
from fedld.methods.fedprox import FedProx

METHODS: dict[str, Method] = {
    "fedavg": FedAvg(),
    "fedprox": FedProx(),
    "fedld": FedLD(),
}

__all__ = ["METHODS", "Card", "FedAvg", "FedLD", "FedProx", "Method", "Replies", "Server"]
