"""Make pages when mkdocs builds the documentation: all tables with their CSV files, and the public names."""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parents[1]))
import fedld
from reproduction.evidence import load_study
from reproduction.pages import comparisons, evidence_page

PUBLIC = "api/public.md"
SECTIONS = {
    "Verbs": "run compare auto tune predict diagnose report load data aggregate decompose",
    "Data and results": "Federation Result Study",
    "Parts of a method": "Method LocalClient Reply Objective ContextObjective Context Rule GramRule",
    "Models and measures": "Model Metric Measure",
    "Callbacks": "Callback EarlyStopping Tracking",
    "Engines": "Engine Backend ThisMachine",
    "Errors": "FedLDError",
}
"""Headings of the page of public names, and the names below each."""
COMMENT = re.compile(r"<!-- /?generated.*?-->", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of public names, `evidence.md` and one CSV file for every study."""
    files.append(File.generated(config, PUBLIC, content=public_page()))
    files.append(File.generated(config, "evidence.md", content=evidence_page()))
    for name in comparisons():
        table = load_study(name).comparison.to_csv()
        files.append(File.generated(config, f"evidence/{name}.csv", content=table))
    return files


def public_page() -> str:
    """Return the page of all public names, as directives that mkdocstrings fills from the docstrings."""
    lines = ["# Public names", "", "What `import fedld` gives, from the docstrings of the code."]
    for heading, names in SECTIONS.items():
        lines += ["", f"## {heading}"]
        for name in names.split():
            options = f"{{heading: fedld.{name}, toc_label: {name}, heading_level: 3}}"
            lines += ["", f"::: {_place_of(name)}", f"    options: {options}"]
    return "\n".join(lines)


def _place_of(name: str) -> str:
    """Return where a public name is defined."""
    if name == "data":  # a module that can be called
        return "fedld.data.make"
    value = getattr(fedld, name)
    return f"{value.__module__}.{value.__qualname__}"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leave out the templates of generated blocks."""
    return COMMENT.sub("", markdown)
