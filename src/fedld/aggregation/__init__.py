"""The server side: one small core that aggregates updates in Gram space, and its rules."""

from fedld.aggregation.conflict import HGD, FedGH, PCGrad
from fedld.aggregation.consensus import Consensus
from fedld.aggregation.coordinate import Median, OutlierPruned, TrimmedMean
from fedld.aggregation.core import Aggregate, aggregate
from fedld.aggregation.files import FileSource, file_source
from fedld.aggregation.multiobjective import CAGrad, MinNorm
from fedld.aggregation.principal import Mean, Principal
from fedld.aggregation.report import Report
from fedld.aggregation.robust import CenteredClip, CosineFilter, GeometricMedian, Krum, MultiKrum, NormClip
from fedld.aggregation.rule import RULES, CoordinateRule, Extras, GramRule, Rule, make_rule
from fedld.aggregation.sources import Source, TensorSpec

__all__ = [
    "HGD",
    "RULES",
    "Aggregate",
    "CAGrad",
    "CenteredClip",
    "Consensus",
    "CoordinateRule",
    "CosineFilter",
    "Extras",
    "FedGH",
    "FileSource",
    "GeometricMedian",
    "GramRule",
    "Krum",
    "Mean",
    "Median",
    "MinNorm",
    "MultiKrum",
    "NormClip",
    "OutlierPruned",
    "PCGrad",
    "Principal",
    "Report",
    "Rule",
    "Source",
    "TensorSpec",
    "TrimmedMean",
    "aggregate",
    "file_source",
    "make_rule",
]
