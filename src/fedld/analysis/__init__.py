"""Loss decomposition, heterogeneity and conflict measures, paired statistics; `diagnosis` explains."""

from fedld.analysis.decomposition import Decomposition, decompose, decompose_line
from fedld.analysis.heterogeneity import LabelMeasures, feature_distances, feature_shift, label_measures
from fedld.analysis.statistics import PairedDifference, holm, paired_difference
from fedld.analysis.updates import Split, UpdateMeasures, gram_report, split, update_measures

__all__ = [
    "Decomposition",
    "LabelMeasures",
    "PairedDifference",
    "Split",
    "UpdateMeasures",
    "decompose",
    "decompose_line",
    "feature_distances",
    "feature_shift",
    "gram_report",
    "holm",
    "label_measures",
    "paired_difference",
    "split",
    "update_measures",
]
