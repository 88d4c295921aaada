"""Shows doctests of docstrings as code; without this, Markdown would read lists in them as links."""

import re
from typing import Any

import griffe

BLOCK = re.compile(r"^>>>.*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


class Doctests(griffe.Extension):
    """Puts a fence around every doctest."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = BLOCK.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
