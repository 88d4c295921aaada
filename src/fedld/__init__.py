"""Federated learning on heterogeneous data: explain, train, prove, scale."""

__version__ = "0.1.0"
