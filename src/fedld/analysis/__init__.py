"""Why it happened: loss decomposition, heterogeneity and conflict measures, paired statistics."""

from fedld.analysis.decomposition import Decomposition, decompose

__all__ = ["Decomposition", "decompose"]
