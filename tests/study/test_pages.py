"""Numbers in the documentation come from the files in results/."""

import importlib.util
import json
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "results" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables():
    return script("tables")


@pytest.fixture(scope="module")
def figures():
    return script("figures")


def test_every_page_shows_the_numbers_of_the_files(tables):
    marked = [path for path in tables.PAGES if "<!-- results " in path.read_text()]
    assert ROOT / "docs/reproduction.md" in marked
    stale = [path.name for path in tables.PAGES if tables.current(path.read_text()) != path.read_text()]
    assert stale == [], "run: python results/tables.py"


def test_no_line_begins_with_a_number_s_comment(tables):
    """Markdown would end the paragraph there."""
    found = [
        f"{path.name}: {line[:60]}"
        for path in tables.PAGES
        for line in path.read_text().splitlines()
        if line.lstrip().startswith(("<!-- value", "<!-- span", "<!-- point"))
    ]
    assert found == []


def test_a_changed_number_is_found_and_mended(tables):
    page = (ROOT / "docs/from-scratch.md").read_text()
    assert tables.current(page.replace("62.70 ± 0.96", "72.70 ± 0.96")) == page
    found = json.loads((ROOT / "results/covid-table1/table.json").read_text())["columns"][0]["rows"][0]
    inline = "<!-- value covid-table1 fedavg final -->99<!-- /value -->"
    assert f">{found['final_mean']:.2f} ± " in tables.current(inline)


def test_what_a_page_asks_for_must_exist(tables):
    with pytest.raises(SystemExit, match="unknown column 'f1'"):
        tables.table("covid-table1 f1")
    with pytest.raises(SystemExit, match="names 2 splits"):
        tables.table("fundus-table1-dirichlet100-1 final")
    with pytest.raises(SystemExit, match="has no row 'nobody'"):
        tables.value("covid-table1", "nobody", "final")


def test_a_table_that_compare_writes_can_be_shown(tables, write_run, tmp_path, monkeypatch):
    from fedld.study.compare import write_comparison
    from fedld.study.comparison import compare_runs

    runs = [write_run("fedavg", s, accuracy=0.8, auroc=0.9) for s in range(3)]
    (tmp_path / "results/new").mkdir(parents=True)
    write_comparison(compare_runs("t", runs, "fedavg"), tmp_path / "results/new", "fedld compare")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert "| `fedavg` | 80.00 ± 0.00 |  | 0.9000 ± 0.0000 | - |" in tables.table(
        "new final difference auroc never_predicted"
    )


def test_the_share_of_the_gap_to_pooled_training(tables):
    def row(label, difference, low=None):
        interval = None if low is None else [low, 9.0]
        return {"label": label, "difference": difference, "interval": interval}

    rows = [row("fedavg", None), row("scaffold", 3.0, 1.0), row("central", 4.0, 3.0)]
    assert [found.get("gap") for found in tables.with_gaps(rows)] == [None, 0.75, 1.0]
    rows[-1]["interval"] = [-0.1, 9.0]
    assert all("gap" not in found for found in tables.with_gaps(rows)), "pooled training is not surely ahead"


def test_a_class_never_predicted_is_told_with_its_seeds(tables):
    row = {"seeds": [0, 1, 2], "never_predicted": {"COVID": 2}}
    assert tables.cell(row, "never_predicted") == "COVID (2 of 3 seeds)"


def test_the_sensitivity_figure_reads_the_tables(figures, tmp_path):
    lines = figures.lines_of(figures.FIGURES["rate"][1][0])
    assert list(lines["fedavg"]) == sorted(lines["fedavg"])
    found = json.loads((ROOT / "results/covid-head-lr0.03/table.json").read_text())["rows"]
    assert lines["fedld"][0.03] == next(row["final"] for row in found if row["label"] == "fedld")
    figures.draw("rate", tmp_path)
    assert "pooled data" in (tmp_path / "sensitivity-rate.svg").read_text()
    assert (tmp_path / "sensitivity-rate.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_of_the_loss_terms_reads_the_tables(figures, tmp_path, monkeypatch):
    (tmp_path / "one").mkdir()
    terms = {"local": 0.25, "shift": 0.5, "aggregation": -0.125, "total": 0.625}
    causes = [{"label": "fedavg", **terms}, {"label": "local", "local": 0.1}]
    (tmp_path / "one/table.json").write_text(json.dumps({"causes": causes}))
    seen = []
    monkeypatch.setattr(figures, "TERMS", {"first": "one", "second": "one"})
    monkeypatch.setattr(figures, "_save", lambda figure, path: seen.append((figure, path.name)))
    figures.draw_terms(tmp_path, tmp_path)
    ((figure, name),) = seen
    ax = figure.axes[0]
    bars = [(bar.get_x(), bar.get_width()) for bar in ax.patches]
    assert bars == [(0, 0.25), (0.25, 0.5), (0.75, -0.125)]
    assert list(ax.lines[0].get_xdata()) == [0.625]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["fedavg"]
    assert [text.get_text() for text in figure.legends[0].texts][-1] == "= global loss"
    assert name == "loss-terms"


def test_names_of_lines_do_not_lie_on_each_other(figures):
    places = list(figures.spread({"a": 0.98, "b": 0.99, "c": 0.99, "d": -2.0}, 0.05).values())
    assert places == sorted(places)
    assert places[0] >= 0
    assert places[-1] <= 1
    assert min(b - a for a, b in pairwise(places)) >= 0.05 - 1e-12


def test_the_rate_of_a_row_is_its_own_or_that_of_all(tables):
    command = "fedld compare --lr 0.1 --set fedld-drift.lr=0.01 --set fedavg.lr=0.03"
    rates = [tables.rate_of(command, label) for label in ("fedavg", "fedld", "fedld-drift")]
    assert rates == ["0.03", "0.1", "0.01"]
    assert tables.rate_of("fedld compare", "fedavg") is None


def test_a_number_s_range_over_several_tables(tables):
    names = [f"covid-head-lr{rate}" for rate in ("0.003", "0.01", "0.1")]
    means = [float(tables.value(name, "fedavg", "final").split()[0]) for name in names]
    low, high = map(float, tables.span("fedavg", "final", " ".join(names)).split(" to "))
    assert (low, high) == pytest.approx((min(means), max(means)), abs=0.051)
    page = f"<!-- span fedavg final {' '.join(names)} -->old<!-- /span -->"
    assert tables.current(page) == page.replace("old", f"{low} to {high}")


def test_tables_may_be_a_pattern(tables):
    names = [f"covid-head-lr{rate}" for rate in ("0.003", "0.01", "0.03", "0.1")]
    assert tables.folders("covid-head-lr0.[01]*") == names
    assert tables.folders("covid-table1 retina-head-table2#retina-split1")[1:] == [
        "retina-head-table2#retina-split1"
    ]
    with pytest.raises(SystemExit, match="no table in results/nothing-\\*"):
        tables.folders("nothing-*")


def test_how_methods_stand_over_several_tables(tables):
    names = [f"covid-head-lr{rate}" for rate in ("0.003", "0.1")]
    rows = [tables.row_of(name, "measured") for name in names]
    assert [row["p_value"] < 0.05 for row in rows] == [True, False]
    first, second = (row["difference"] for row in rows)
    cells = ["`measured`", "1", "1", "0", f"{(first + second) / 2:+.2f}", f"{second:+.2f}", f"{first:+.2f}"]
    assert f"| {' | '.join(cells)} |" in tables.standing(f"accuracy {' '.join(names)}").splitlines()
    assert "`fedavg`" not in tables.standing(f"accuracy {' '.join(names)}"), (
        "the baseline has no difference to itself"
    )


def test_differences_in_the_auroc(tables):
    own, base = (tables.row_of("covid-head-lr0.1", label)["auroc"] for label in ("measured", "fedavg"))
    found = tables.row_of("covid-head-lr0.1", "measured")["in_auroc"]
    assert found["difference"] == pytest.approx(100 * (sum(own) - sum(base)) / 10)
    assert found["interval"][0] < found["difference"] < found["interval"][1]
    told = tables.value("covid-head-lr0.1", "measured", "auroc_difference")
    assert told.startswith(f"{found['difference']:+.2f} [")
    (line,) = (x for x in tables.standing("auroc covid-head-lr0.1").splitlines() if "`measured`" in x)
    assert f"{found['difference']:+.2f}" in line
    with pytest.raises(SystemExit, match="not 'f1'"):
        tables.standing("f1 covid-head-lr0.1")


def test_a_term_of_figure_2(tables):
    points = json.loads((ROOT / "results/figure2-fundus-head/figure2.json").read_text())["points"]

    def mean(arm, alpha):
        found = [one["shift"] for one in points if (one["arm"], one["alpha"]) == (arm, alpha)]
        assert len(found) == 10
        return sum(found) / 10

    def told(arms, alpha):
        return tables.point("figure2-fundus-head", arms, "shift", alpha)

    plain, margin = mean("plain", 0.01), mean("margin", 0.01)
    assert told("plain", "0.01") == f"{plain:.3f}"
    assert told("margin-plain", "0.01") == f"{margin - plain:+.3f}"
    assert told("margin/plain", "0.01") == f"{100 * (margin / plain - 1):+.0f} %"
    assert told("plain", "all") == f"{mean('plain', 100):.3f} to {plain:.3f}"
    page = "<!-- point figure2-fundus-head plain shift 0.01 -->old<!-- /point -->"
    assert tables.current(page) == page.replace("old", f"{plain:.3f}")
    with pytest.raises(SystemExit, match="has no 'nobody' at alpha"):
        told("nobody", "0.01")


def test_a_rows_own_lambda_or_mu(tables):
    margin = "--set 'fedld.objective={{name=\"marg-log\",lam={}}}'"
    command = f"fedld compare {margin.format(0.03)} --set fedprox.mu=0.1 {margin.format(0.1)}"
    assert [tables.number_of(command, label) for label in ("fedavg", "fedprox", "fedld")] == [
        None,
        "0.1",
        "0.1",
    ]


def test_one_column_of_several_tables(tables):
    head, _, first, *_ = tables.across("final low=covid-head-lr0.01 high=covid-head-lr0.1").splitlines()
    assert head == "|  | low | high |"
    found = [tables.value(f"covid-head-lr{rate}", "fedavg", "final") for rate in ("0.01", "0.1")]
    assert first == f"| `fedavg` | {' | '.join(found)} |"
