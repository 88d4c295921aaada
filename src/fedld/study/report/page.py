"""The page: everything in one file, nothing from the network, every name escaped."""

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from fedld import __version__
from fedld.records.reader import StudyRecords
from fedld.study.report.build import Group, Missing
from fedld.study.report.chart import Chart
from fedld.study.report.style import css_variables
from fedld.study.report.tables import PageTable
from fedld.study.verdict import answers


def render(study: StudyRecords, groups: list[Group], *, live: bool = False) -> str:
    """The page of a study; a live one asks its own server for changes and for nothing else."""
    script = asset("page.js") + (asset("live.js") if live else "")
    return _template().render(
        study=study,
        groups=groups,
        script=Markup(script),  # our own file: it holds no data
        policy=_policy(script, live),
        style=Markup(css_variables() + asset("page.css")),
        version=__version__,
    )


def _policy(script: str, live: bool) -> str:
    """Only our own script runs, and nothing is fetched from anywhere."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


@cache
def asset(name: str) -> str:
    """A file beside this one."""
    return (files("fedld.study.report") / "assets" / name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals = {"answers": answers, "svg": svg, "embed": embed}
    environment.globals |= {"kind": kind}
    return environment.from_string(asset("page.html"))


def svg(chart: Chart, prefix: str) -> Markup:
    """The drawing; matplotlib escapes every text in it, and the label is escaped here."""
    return Markup(chart.inline(prefix, str(escape(chart.summary))))


def embed(chart: Chart) -> Markup:
    """Data for the page's script. No '<' is left in it, so no name can close the element."""
    data: dict[str, Any] = {
        "name": chart.name,
        "title": chart.title,
        "hover": chart.hover,
        "heat": chart.heat,
    }
    if chart.heat is None:
        data |= {"columns": chart.columns, "rows": chart.rows}
    text = json.dumps(_short(data), separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _short(value: Any) -> Any:
    """Six significant digits are enough for a page, and JSON knows no nan."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list | tuple) else value


def kind(block: object) -> str:
    """What a block is, for the template."""
    return {Chart: "chart", PageTable: "table", Missing: "missing"}.get(type(block), "other")
