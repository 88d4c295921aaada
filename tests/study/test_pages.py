"""Numbers in the documentation come from the tidy file of the reproduction."""

import json
import re
import shutil
from itertools import pairwise

import pytest

from fedld.errors import FedLDError
from fedld.study.compare import write_comparison
from fedld.study.comparison import compare_runs
from reproduction import evidence, figures, pages
from reproduction.add import add, replace_rows, settings_of
from reproduction.candidates import SHARED, write_candidates

TEXTS = {path.name: path.read_text(encoding="utf-8") for path in pages.PAGES}
NUMBER = re.compile(r"<!-- (results|across|span|standing|point|value) ")


def numbers(study, method, measure):
    """Values by seed, read from the file and not from a comparison."""
    lines = [one for one in evidence.numbers_of(study) if (one.method, one.measure) == (method, measure)]
    return [line.value for line in lines]


def test_every_page_shows_the_numbers_of_the_file():
    assert "<!-- generated" in TEXTS["reproduction.md"]
    assert pages.update_pages(write=False) == [], "run: python -m reproduction pages"


def test_pages_have_one_kind_of_block():
    assert [name for name, text in TEXTS.items() if NUMBER.search(text)] == []
    for name, text in TEXTS.items():
        assert text.count("<!-- generated") == text.count("<!-- /generated -->"), name


def test_a_changed_number_is_found_and_replaced(tmp_path):
    page = tmp_path / "page.md"
    text = TEXTS["from-scratch.md"]
    page.write_text(text.replace("62.70 ± 0.96", "72.70 ± 0.96"))
    assert pages.update_pages([page], write=False) == ["page.md"]
    assert pages.update_pages([page]) == ["page.md"]
    assert page.read_text() == text


def test_what_a_page_asks_for_must_exist():
    with pytest.raises(FedLDError, match="unknown column 'f1'"):
        pages.table("covid-table1", "f1")
    with pytest.raises(FedLDError, match="no study 'fundus-table1-dirichlet100-1'"):
        pages.table("fundus-table1-dirichlet100-1", "final")
    with pytest.raises(FedLDError, match="has no row 'nothing'"):
        pages.value("covid-table1", "nothing", "final")
    with pytest.raises(FedLDError, match="is a search, not a comparison"):
        pages.table("tune/covid-head-fedavg", "final")
    with pytest.raises(FedLDError, match="is a comparison, not a Figure 2"):
        pages.figure("covid-table1")


def test_statistics_are_those_of_the_package():
    values, base = (numbers("covid-head-tuned", name, "accuracy") for name in ("scaffold", "fedavg"))
    standing = evidence.load_study("covid-head-tuned").standing("scaffold")
    assert standing.difference.mean == pytest.approx((sum(values) - sum(base)) / 10)
    assert standing.p_value > standing.difference.p_value, "corrected for all methods"
    assert pages.value("covid-head-tuned", "scaffold", "difference") == (
        f"{standing.difference.mean:+.2f} [{standing.difference.interval[0]:+.2f}, "
        f"{standing.difference.interval[1]:+.2f}]"
    )


def test_a_finished_study_is_added_as_it_was_compared(write_run, tmp_path):
    methods = {"fedavg": 0.8, "fedld": 0.7}
    runs = [
        write_run(name, seed, accuracy=x + seed / 100, auroc=0.9)
        for name, x in methods.items()
        for seed in range(3)
    ]
    compared = compare_runs("t", runs, "fedavg")
    out = tmp_path / "new"
    out.mkdir()
    write_comparison(compared, out, f"fedld compare --set fedld.lr=0.03 --dataset npz:{tmp_path}/a.npz")
    files = {"numbers": tmp_path / "e.csv.gz", "commands": tmp_path / "c.json"}
    for _ in range(2):  # a study with the same name replaces it
        assert add([out], {str(tmp_path): "DATA"}, **files) == ["new"]
    lines, about = evidence.read_numbers(files["numbers"]), evidence.read_commands(files["commands"])["new"]
    assert about["command"].endswith("npz:DATA/a.npz")
    assert {line.federation for line in lines} == {"a"}
    study = evidence.make_study("new", about, lines)
    assert study.comparison.to_csv() == compared.to_csv()
    assert study.comparison.verdict == compared.verdict
    assert study.settings["fedld"] == {"lr": 0.03}
    with pytest.raises(FedLDError, match="has no table"):
        add([tmp_path], **files)


def test_rows_of_a_study_are_replaced_where_they_stand(write_run, tmp_path):
    files = {"numbers": tmp_path / "e.csv.gz", "commands": tmp_path / "c.json"}
    accuracies = {"fedavg": 0.8, "measured": 0.7, "fedld": 0.6}
    for name, methods in {"whole": accuracies, "again": {"measured": 0.75}}.items():
        out = tmp_path / name / "study"
        out.mkdir(parents=True)
        runs = [
            write_run(method, seed, accuracy=x + seed / 100, auroc=0.9)
            for method, x in methods.items()
            for seed in range(3)
        ]
        write_comparison(compare_runs("t", runs, next(iter(methods))), out, "fedld compare --lr 0.1")
        for run in runs:
            shutil.rmtree(run.path)
    add([tmp_path / "whole" / "study"], **files)
    before = evidence.read_numbers(files["numbers"])
    moved = replace_rows([tmp_path / "again" / "study"], ["measured"], files["numbers"])
    assert moved == ["study: measured, 3 seeds, accuracy 71.00 -> 76.00"]
    after = evidence.read_numbers(files["numbers"])
    assert [(one.method, one.seed) for one in after] == [(one.method, one.seed) for one in before]
    changed = {(one.method, one.measure) for one, two in zip(before, after, strict=True) if one != two}
    assert ("measured", "accuracy") in changed
    assert {method for method, _ in changed} == {"measured"}
    with pytest.raises(FedLDError, match="other seeds, settings or measures of 'fedavg' than before"):
        replace_rows([tmp_path / "again" / "study"], ["fedavg"], files["numbers"])


def test_candidates_of_a_search_by_hand_are_added_with_what_held_out_images_said(tmp_path):
    for name, accuracies in {"slow": [0.5, 0.6, 0.7, 0.8], "stopped": [0.9]}.items():
        (tmp_path / "hand" / name).mkdir(parents=True)
        tests = [{"accuracy": accuracy, "auroc": 0.9, "loss": 0.5} for accuracy in accuracies]
        lines = [json.dumps({"round": k + 1, "test": test}) for k, test in enumerate(tests)]
        (tmp_path / "hand" / name / "rounds.jsonl").write_text("\n".join([*lines, '{"round": 5}']))
        clients = [json.dumps({"round": k, "train_loss": k * loss}) for k in (1, 2) for loss in (0.1, 0.2)]
        (tmp_path / "hand" / name / "clients.jsonl").write_text("\n".join(clients))
        shared = "\n".join(f'{key} = "x"' for key in SHARED if key != "dataset")
        config = (
            f'dataset = "digits"\n{shared}\nseed = 0\nlr = 0.1\n[method]\nname = "scaffold"\nbeta = 0.5\n'
        )
        (tmp_path / "hand" / name / "config.toml").write_text(config)
    file = write_candidates(tmp_path / "hand")
    first, second = json.loads(file.read_text())["trials"]
    assert first["values"] == {
        "candidate": "stopped",
        "method": "scaffold",
        "rounds": 2,
        "lr": 0.1,
        "method.beta": 0.5,
    }
    assert second["score"] == pytest.approx(70.0)
    assert second["measures"]["largest_train_loss_round2"] == pytest.approx(0.4)
    tidy = tmp_path / "evidence.csv.gz"
    assert add([tmp_path / "hand"], numbers=tidy, commands=tmp_path / "commands.json") == ["tune/hand"]
    values = {(one.measure, one.value) for one in evidence.read_numbers(tidy)}
    assert {("held_out_accuracy", 90.0), ("held_out_best", 80.0), ("held_out_auroc", 0.9)} <= values
    with pytest.raises(FedLDError, match="has an evaluation"):
        write_candidates(tmp_path / "hand" / "slow")


def test_the_page_of_all_tables_has_every_study():
    page = pages.evidence_page()
    assert all(f"(evidence/{name}.csv)" in page for name in pages.comparisons())
    assert pages.value("covid-head-tuned", "fedld", "final") in page


def test_the_share_of_the_gap_to_pooled_training():
    rows = {row.label: row for row in pages.rows_of("covid-head-tuned")}
    lead = rows["central"].standing.difference.mean
    assert pages.gap(rows["scaffold"]) == rows["scaffold"].standing.difference.mean / lead
    assert pages.gap(rows["fedavg"]) is None
    behind = [row for row in pages.rows_of("retina-split1-head-tuned") if row.label == "central"]
    assert behind[0].standing.difference.interval[0] <= 0
    assert pages.gap(behind[0]) is None, "pooled training is not significantly ahead"


def test_a_class_never_predicted_is_shown_with_its_seeds():
    assert pages.value("covid-head-tuned", "fedpac", "never_predicted") == "2 (10 of 10 seeds)"


def test_the_sensitivity_figure_reads_the_tables(tmp_path):
    lines = figures.lines_of(figures.FIGURES["rate"][1][0])
    assert list(lines["fedavg"]) == sorted(lines["fedavg"])
    assert lines["fedld"][0.03] == numbers("covid-head-lr0.03", "fedld", "accuracy")
    figures.draw("rate", tmp_path)
    assert "pooled data" in (tmp_path / "sensitivity-rate.svg").read_text()
    assert (tmp_path / "sensitivity-rate.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_of_the_loss_terms_reads_the_tables(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(figures, "_save", lambda figure, path: seen.append((figure, path.name)))
    figures.draw_terms(panels=dict.fromkeys(("first", "second"), "covid-head-shared"), folder=tmp_path)
    ((figure, name),) = seen
    ax = figure.axes[0]
    account = evidence.load_study("covid-head-shared").standing("fedavg").account
    assert ax.patches[0].get_width() == account.local
    assert ax.lines[0].get_xdata()[0] == account.total
    assert [text.get_text() for text in figure.legends[0].texts][-1] == "= global loss"
    assert name == "loss-terms"


def test_names_of_lines_do_not_lie_on_each_other():
    places = list(figures.spread({"a": 0.98, "b": 0.99, "c": 0.99, "d": -2.0}, 0.05).values())
    assert places == sorted(places)
    assert places[0] >= 0
    assert places[-1] <= 1
    assert min(b - a for a, b in pairwise(places)) >= 0.05 - 1e-12


def test_settings_of_a_row_are_its_own_or_those_of_all():
    command = "fedld compare --lr 0.1 --set fedld-drift.lr=0.01 --set fedavg.lr=0.03"
    rates = [settings_of(command, label)["lr"] for label in ("fedavg", "fedld", "fedld-drift")]
    assert rates == [0.03, 0.1, 0.01]
    assert settings_of("fedld compare", "fedavg") == {}
    margin = "--set 'fedld.objective={{name=\"marg-log\",lam={}}}'"
    command = f"fedld compare {margin.format(0.03)} --set fedprox.mu=0.1 {margin.format(0.1)}"
    assert settings_of(command, "fedprox") == {"mu": 0.1}
    assert settings_of(command, "fedld")["lam"] == 0.1, "the last one counts"


def test_a_range_over_several_studies():
    names = [f"covid-head-lr{rate}" for rate in ("0.003", "0.01", "0.1")]
    means = [float(pages.value(name, "fedavg", "final").split()[0]) for name in names]
    low, high = map(float, pages.span("fedavg", "final", *names).split(" to "))
    assert (low, high) == pytest.approx((min(means), max(means)), abs=0.051)


def test_names_of_studies_may_be_a_pattern():
    names = [f"covid-head-lr{rate}" for rate in ("0.003", "0.01", "0.03", "0.1")]
    assert evidence.names("covid-head-lr0.[01]*") == names
    with pytest.raises(FedLDError, match="no study 'nothing-\\*'"):
        evidence.names("nothing-*")


def test_how_methods_stand_over_several_studies():
    names = [f"covid-head-lr{rate}" for rate in ("0.003", "0.1")]
    rows = [pages.row_of(name, "measured").standing for name in names]
    assert [row.significant for row in rows] == [True, False]
    first, second = (row.difference.mean for row in rows)
    cells = ["`measured`", "1", "1", "0", f"{(first + second) / 2:+.2f}", f"{second:+.2f}", f"{first:+.2f}"]
    text = pages.standings("accuracy", *names)
    assert f"| {' | '.join(cells)} |" in text.splitlines()
    assert "`fedavg`" not in text, "the baseline has no difference to itself"


def test_differences_in_the_auroc():
    ours, base = (numbers("covid-head-lr0.1", label, "auroc") for label in ("measured", "fedavg"))
    difference = 100 * (sum(ours) - sum(base)) / 10
    assert pages.value("covid-head-lr0.1", "measured", "auroc_difference").startswith(f"{difference:+.2f} [")
    text = pages.standings("auroc", "covid-head-lr0.1").splitlines()
    assert f"{difference:+.2f}" in next(line for line in text if "`measured`" in line)
    with pytest.raises(FedLDError, match="not 'f1'"):
        pages.standings("f1", "covid-head-lr0.1")


def test_a_term_of_figure_2():
    def mean(arm, alpha):
        lines = evidence.numbers_of("figure2-fundus-head")
        wanted = [one for one in lines if (one.method, one.measure) == (arm, "shift")]
        values = [one.value for one in wanted if json.loads(one.settings)["alpha"] == alpha]
        assert len(values) == 10
        return sum(values) / 10

    def shown(arms, alpha):
        return pages.point("figure2-fundus-head", arms, "shift", alpha)

    plain, margin = mean("plain", 0.01), mean("margin", 0.01)
    assert shown("plain", 0.01) == f"{plain:.3f}"
    assert shown("margin-plain", 0.01) == f"{margin - plain:+.3f}"
    assert shown("margin/plain", 0.01) == f"{100 * (margin / plain - 1):+.0f} %"
    assert shown("plain", "all") == f"{mean('plain', 100):.3f} to {plain:.3f}"
    with pytest.raises(FedLDError, match="has no 'nothing' at alpha"):
        shown("nothing", 0.01)


def test_one_column_of_several_studies():
    head, _, first, *_ = pages.across(
        "final", {"low": "covid-head-lr0.01", "high": "covid-head-lr0.1"}
    ).splitlines()
    assert head == "|  | low | high |"
    values = [pages.value(f"covid-head-lr{rate}", "fedavg", "final") for rate in ("0.01", "0.1")]
    assert first == f"| `fedavg` | {' | '.join(values)} |"


def test_a_closed_form_stands_beside_the_methods_of_another_study():
    rows = pages.choice("covid-head-tuned", "covid-head-rounds200", "covid-head-closed", "fedavg fedld ridge")
    base = numbers("covid-head-tuned", "fedavg", "accuracy")
    (closed,) = numbers("covid-head-closed", "ridge", "accuracy")
    cells = {line.split("|")[1].strip(): line.split("|")[2:] for line in rows.splitlines()}
    assert cells["`ridge`"][0].startswith(f" {closed - sum(base) / len(base):+.2f} [")
    assert cells["`ridge`"][1].strip() == "1"
    reached = pages.load_study("covid-head-rounds200").standing("fedavg").reached
    assert cells["`fedavg`"][:2] == [" 0 ", f" {reached.round} "]
    assert 10 < reached.round <= 200
    assert cells["`fedld`"][1].strip() == "not reached"
    with pytest.raises(FedLDError, match="has 10 seeds; a closed form has one run"):
        pages.with_closed_form("covid-head-tuned", "covid-head-random")
    with pytest.raises(FedLDError, match="'fundus-source-head-tuned' is on"):
        pages.with_closed_form("fundus-source-head-tuned", "covid-head-closed")
