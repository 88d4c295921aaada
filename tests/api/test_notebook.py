"""The notebook under examples/, cell by cell as a kernel runs it."""

import ast
import json
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "examples/own_parts.ipynb"


def shown(cells):
    """What the last expression of every cell shows."""
    scope = {"__name__": "notebook"}
    for cell in cells:
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), scope)
        if last is not None:
            yield eval(compile(ast.Expression(last.value), "cell", "eval"), scope)


def test_the_notebook_shows_table_verdict_and_picture():
    cells = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    result, study = shown(cells)
    assert len(result.rounds) == 6
    assert "top2" in result.rounds[-1]["test"]
    page = study._repr_html_()
    assert study.verdict in page
    assert all(f"<td>{label}</td>" in page for label in ("fedavg", "Careful"))
    assert 'src="data:image/png;base64,' in page
