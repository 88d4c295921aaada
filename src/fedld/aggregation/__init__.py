"""The server side: one small core that aggregates updates in Gram space, and its rules."""

from fedld.aggregation.conflict import (
    HGD,
    CAGrad,
    Consensus,
    GradientHarmonisation,
    MinNorm,
    PCGrad,
    PrincipalGradient,
)
from fedld.aggregation.core import (
    Aggregate,
    Bounds,
    HiddenUpdates,
    Updates,
    aggregate,
    combine_updates,
    location_of,
)
from fedld.aggregation.inputs import Outlier, statistic_problem, too_long
from fedld.aggregation.measured import Candidates, Measured, Trial, Vote
from fedld.aggregation.principal import Mean, Principal
from fedld.aggregation.report import Report
from fedld.aggregation.robust import (
    CenteredClip,
    CosineFilter,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NormClip,
    OutlierPruned,
    TrimmedMean,
)
from fedld.aggregation.rule import RULES, CoordinateRule, Extras, GramRule, Rule, make_rule
from fedld.aggregation.sketch import CountSketch
from fedld.aggregation.sources import FileSource, MatrixSource, Source, TensorSpec, column_specs, file_source

RULES.load_plugins()

__all__ = [
    "HGD",
    "RULES",
    "Aggregate",
    "Bounds",
    "CAGrad",
    "Candidates",
    "CenteredClip",
    "Consensus",
    "CoordinateRule",
    "CosineFilter",
    "CountSketch",
    "Extras",
    "FileSource",
    "GeometricMedian",
    "GradientHarmonisation",
    "GramRule",
    "HiddenUpdates",
    "Krum",
    "MatrixSource",
    "Mean",
    "Measured",
    "Median",
    "MinNorm",
    "MultiKrum",
    "NormClip",
    "Outlier",
    "OutlierPruned",
    "PCGrad",
    "Principal",
    "PrincipalGradient",
    "Report",
    "Rule",
    "Source",
    "TensorSpec",
    "Trial",
    "TrimmedMean",
    "Updates",
    "Vote",
    "aggregate",
    "column_specs",
    "combine_updates",
    "file_source",
    "location_of",
    "make_rule",
    "statistic_problem",
    "too_long",
]
