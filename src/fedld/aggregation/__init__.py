"""The server side: one small core that aggregates updates in Gram space, and its rules."""

from fedld.aggregation.core import Aggregate, aggregate
from fedld.aggregation.principal import Mean, Principal
from fedld.aggregation.report import Report
from fedld.aggregation.rule import RULES, CoordinateRule, Extras, GramRule, Rule, make_rule
from fedld.aggregation.sources import Source

__all__ = [
    "RULES",
    "Aggregate",
    "CoordinateRule",
    "Extras",
    "GramRule",
    "Mean",
    "Principal",
    "Report",
    "Rule",
    "Source",
    "aggregate",
    "make_rule",
]
