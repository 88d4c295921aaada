"""Federated learning on heterogeneous data: explain, train, prove, scale."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedld.study.load import load

__all__ = ["__version__", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`fedld.load` on first use, so that `import fedld` stays light."""
    if name == "load":
        from fedld.study.load import load

        return load
    raise AttributeError(f"module 'fedld' has no attribute '{name}'")
