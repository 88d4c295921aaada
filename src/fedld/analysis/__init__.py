"""Why it happened: loss decomposition, heterogeneity and conflict measures, diagnosis, paired statistics."""

from fedld.analysis.decomposition import Decomposition, decompose, decompose_line
from fedld.analysis.diagnosis.checks import diagnose
from fedld.analysis.diagnosis.evidence import Evidence, Finding
from fedld.analysis.diagnosis.thresholds import THRESHOLDS
from fedld.analysis.heterogeneity import LabelMeasures, feature_distances, feature_shift, label_measures
from fedld.analysis.statistics import PairedDifference, holm, paired_difference
from fedld.analysis.updates import Split, UpdateMeasures, gram_report, split, update_measures

__all__ = [
    "THRESHOLDS",
    "Decomposition",
    "Evidence",
    "Finding",
    "LabelMeasures",
    "PairedDifference",
    "Split",
    "UpdateMeasures",
    "decompose",
    "decompose_line",
    "diagnose",
    "feature_distances",
    "feature_shift",
    "gram_report",
    "holm",
    "label_measures",
    "paired_difference",
    "split",
    "update_measures",
]
