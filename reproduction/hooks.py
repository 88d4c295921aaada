"""Make the page of all tables and its CSV files when mkdocs builds the documentation."""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduction.evidence import load_study
from reproduction.pages import comparisons, evidence_page

COMMENT = re.compile(r"<!-- /?generated.*?-->", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add `evidence.md` and one CSV file for every study."""
    files.append(File.generated(config, "evidence.md", content=evidence_page()))
    for name in comparisons():
        table = load_study(name).comparison.to_csv()
        files.append(File.generated(config, f"evidence/{name}.csv", content=table))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leave out the templates of generated blocks."""
    return COMMENT.sub("", markdown)
