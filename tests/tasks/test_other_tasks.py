"""Tables, regression and survival: the data they take, their losses and measures, and whole runs."""

import csv
import json

import numpy as np
import polars
import pytest
import torch
from scipy import optimize
from typer.testing import CliRunner

import fedld
from fedld.cli import app
from fedld.data.sheet import make_features, read_columns
from fedld.data.targets import target_facts
from fedld.errors import FedLDError
from fedld.study.card import make_card
from fedld.tasks.measure import merged
from fedld.tasks.regression import Regression
from fedld.tasks.survival import Survival, concordance, partial_likelihood

SITES = ("delhi", "oslo", "lima")


def write(path, rows, head):
    path.write_text("\n".join(",".join(map(str, row)) for row in [head, *rows]) + "\n")
    return f"csv:{path}"


@pytest.fixture
def table(tmp_path):
    """120 patients of three sites: a number with missing cells, a category, and every kind of target."""
    rng = np.random.default_rng(0)
    age, dose = rng.normal(60, 10, 120), rng.normal(size=120)
    risk = 0.05 * (age - 60) + dose
    rows = []
    for k in range(120):
        cell = "" if k % 7 == 3 else f"{dose[k]:.4f}"
        time = rng.exponential(np.exp(-risk[k])) + 0.01
        sick = int(risk[k] + 0.3 * rng.normal() > 0)
        value, split = 20 + 3 * risk[k] + 0.2 * rng.normal(), "test" if k % 5 == 0 else "train"
        person = [f"p{k}", SITES[k % 3], f"{age[k]:.2f}", cell, "mf"[k % 2]]
        rows.append([*person, f"{time:.5f}", int(k % 4 > 0), sick, f"{value:.4f}", split])
    head = ["patient", "site", "age", "dose", "sex", "time", "event", "sick", "value", "split"]
    return write(tmp_path / "patients.csv", rows, head)


DROP = {
    "classification": ("sick", "time,event,value"),
    "regression": ("value", "time,event,sick"),
    "survival": ("time,event", "sick,value"),
    "regression-absolute": ("value", "time,event,sick"),
    "survival-discrete": ("time,event", "sick,value"),
}


def settings(table, task, **changes):
    target, drop = DROP[task]
    return {
        "dataset": table,
        "task": task,
        "target_column": target,
        "site_column": "site",
        "split_column": "split",
        "data": {"drop": drop},
        "model": "linear",
        "lr": 0.1,
        "rounds": 6,
        "workers": 0,
        "min_size": 5,
    } | changes


def run(table, task, out, method="fedavg", **changes):
    given = settings(table, task, **changes)
    return fedld.run(method, given.pop("dataset"), out=out, **given)


@pytest.mark.parametrize("task", DROP)
def test_a_table_is_learned_and_its_loss_adds_up(table, task, tmp_path):
    lr = 0.05 if task == "regression-absolute" else 0.3  # its gradient does not shrink with the error
    result = run(table, task, tmp_path / "run", decompose=1, rounds=25, lr=lr)
    first, last = result.rounds[0], result.rounds[-1]
    assert all(abs(line["identity_error"]) < 1e-9 for line in result.rounds)
    assert last["test"]["loss"] < first["test"]["loss"]
    least = {"classification": ("accuracy", 0.8), "regression": ("r2", 0.6), "survival": ("concordance", 0.7)}
    name, value = least[task.partition("-")[0]]
    assert last["test"][name] > value
    assert set(last["client_tests"]) == set(SITES)
    head = (tmp_path / "run/predictions.csv").read_text().splitlines()
    assert len(head) == 25
    assert json.loads((tmp_path / "run/run.json").read_text())["task"] == task
    assert "delhi" in make_card(tmp_path / "run").to_markdown()
    page = result.report(tmp_path / "page.html").read_text()
    shown = {"survival": "Survival by predicted risk", "regression": "<h3>Calibration</h3>"}
    assert shown.get(task.partition("-")[0], "Confusion") in page
    assert "records are damaged" not in page


@pytest.mark.parametrize("task", ["regression", "survival"])
def test_methods_rules_and_personal_models_work_with_every_task(table, task, tmp_path):
    given = settings(table, task, rounds=2, decompose=2)
    study = fedld.compare(
        ["fedavg", "scaffold", "fedld-drift", "ditto", "local"],
        given.pop("dataset"),
        seeds=[0],
        jobs=0,
        out=tmp_path / "study",
        validation=None,
        **given,
    )
    first = {"regression": "RMSE", "survival": "concordance index"}[task]
    assert study.table[0][1].startswith(first)
    assert len(study.table) == 6
    for rule in ("measured", "median"):
        last = run(table, task, tmp_path / rule, rule=rule, rounds=2, validation=0.2).rounds[-1]
        assert last["validation"]["count"] > 0


@pytest.mark.parametrize(
    ("task", "method", "measure", "least"),
    [
        ("regression", "ridge", "r2", 0.85),
        ("survival", "newton", "concordance", 0.7),
        ("classification", "newton", "accuracy", 0.8),
        ("classification", "ridge", "accuracy", 0.8),
    ],
)
def test_closed_forms_solve_a_table(table, task, method, measure, least, tmp_path):
    rounds = 1 if method == "ridge" else 8
    result = run(table, task, tmp_path / "run", method=method, rounds=rounds, decompose=rounds)
    assert result.rounds[-1]["test"][measure] > least
    assert abs(result.rounds[-1]["identity_error"]) < 1e-9
    if task == "survival":
        losses = [line["test"]["loss"] for line in result.rounds]
        assert abs(losses[-1] - losses[-2]) < 1e-5


SHOWN = {
    "classification": ("missing cells", "labels"),
    "regression": ("upper quartile", "groups"),
    "survival": ("event rate", "groups"),
}


@pytest.mark.parametrize("task", SHOWN)
def test_how_clients_differ_is_told_before_training(table, task, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    target, drop = DROP[task]
    words = ["--dataset", table, "--task", task, "--target-column", target, "--site-column", "site"]
    words += ["--split-column", "split", "--set", f"data.drop={drop}"]
    told = CliRunner().invoke(app, ["data", *words, "--png", str(tmp_path / "data.png")])
    assert told.exit_code == 0, told.output
    for word in (*SHOWN[task], "24 test rows"):
        assert word in told.output
    plain = json.loads(CliRunner().invoke(app, ["data", *words, "--json"]).output)
    assert all("missing cells" in client["targets"] for client in plain["clients"])
    found = json.loads(CliRunner().invoke(app, ["diagnose", *words, "--json"]).output)["findings"]
    sentence = next(one["sentence"] for one in found if one["check"] == "targets")
    assert SHOWN[task][0] in sentence
    assert "(delhi)" in sentence or "(oslo)" in sentence
    assert not any("Images" in one["sentence"] for one in found)


def test_facts_of_targets_are_those_of_the_clients_own_rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    labels = np.stack([np.arange(40) % 2, np.where(np.arange(40) < 20, -1, np.arange(40) % 4 == 0)], 1)
    parts = {"a": (x[:20], labels[:20]), "b": (x[20:], labels[20:])}
    data = fedld.Federation.from_arrays(parts, (x, labels), task="multilabel", classes=["mass", "edema"])
    one, other = (target_facts(data, client) for client in data.clients)
    assert one == {"mass": 0.5, "unknown": 0.5}
    assert other == {"mass": 0.5, "edema": 0.25, "unknown": 0.0}
    masks = np.zeros((4, 8, 8), np.uint8)
    masks[:2, :4] = 1
    pictures = np.zeros((4, 8, 8), np.uint8)
    data = fedld.Federation.from_arrays({"a": (pictures, masks)}, (pictures, masks), task="segmentation")
    assert target_facts(data, data.clients[0]) == {"marked pixels": 0.25, "foreground": 0.5}


def test_a_method_or_objective_that_needs_classes_says_so_before_the_run(table, tmp_path):
    with pytest.raises(FedLDError, match="method 'ccvr' needs statistics of every class, and regression"):
        run(table, "regression", tmp_path / "run", method="ccvr")
    with pytest.raises(
        FedLDError, match="method 'ridge' needs codes of classes, and survival has no classes"
    ):
        run(table, "survival", tmp_path / "run", method="ridge")
    with pytest.raises(FedLDError, match="start = 'closed' solves for codes of classes, and survival"):
        run(table, "survival", tmp_path / "run", start="closed")
    with pytest.raises(FedLDError, match="objective 'marg-log' of 'fedavg' needs classes"):
        run(table, "survival", tmp_path / "run", objective="marg-log")
    with pytest.raises(FedLDError, match="task 'regression' does not fit 'digits'"):
        fedld.run("fedavg", "digits", task="regression", out=tmp_path / "run")
    with pytest.raises(FedLDError, match="unknown task 'regresion': did you mean 'regression'"):
        fedld.run("fedavg", "digits", task="regresion", out=tmp_path / "run")
    with pytest.raises(FedLDError, match="take --model linear"):
        run(table, "survival", tmp_path / "run", model="cnn")
    assert not (tmp_path / "run").exists()


def test_own_arrays_may_have_any_task(tmp_path):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    y = 5 + x @ np.array([1.0, -2.0, 0.5])
    data = fedld.Federation.from_arrays({"a": (x[:30], y[:30]), "b": (x[30:], y[30:])}, task="regression")
    result = fedld.run("fedavg", data, model="linear", rounds=15, lr=0.1, workers=0, out=tmp_path / "run")
    assert result.rounds[-1]["test"]["r2"] > 0.9
    with pytest.raises(FedLDError, match=r"survival needs \(time, event\)|labels of shape"):
        fedld.Federation.from_arrays({"a": (x, y)}, task="survival")


def test_missing_numbers_become_the_mean_of_all_clients_and_are_marked(table):
    spec = {
        key: value for key, value in settings(table, "regression").items() if key in ("task", "target_column")
    }
    federation = fedld.data(
        table, site_column="site", split_column="split", drop="time,event,sick", min_size=5, **spec
    )
    rows = np.concatenate([client.train for client in federation.clients])
    dose = federation.images[rows, 1].astype(np.float64)
    assert np.isnan(federation.images[:, 1]).sum() == 17
    assert federation.mean[1] == pytest.approx(np.nanmean(dose), abs=1e-6)
    assert federation.std[1] == pytest.approx(np.nanstd(dose), abs=1e-6)
    assert (federation.mean[2], federation.std[2]) == (0.0, 1.0)  # where the cells are missing
    assert set(federation.images[:, 2]) == {0.0, 1.0}


def test_regression_measures_are_those_of_the_targets_own_unit():
    rng = np.random.default_rng(0)
    targets = rng.normal(50, 7, 40)
    sums = [Regression().target_sums(part) for part in (targets[:10], targets[10:])]
    task = Regression().fitted(sums, ["value"])
    assert (task.mean, task.deviation) == pytest.approx((targets.mean(), targets.std()))
    outputs, y = torch.randn(40, 1, generator=torch.Generator().manual_seed(0)), torch.from_numpy(targets)
    parts = merged([task.tally(outputs[:25], y[:25]), task.tally(outputs[25:], y[25:])])
    scores = task.scores(parts)
    guess = outputs[:, 0].double().numpy() * targets.std() + targets.mean()
    assert scores["rmse"] == pytest.approx(np.sqrt(np.mean((guess - targets) ** 2)))
    assert scores["mae"] == pytest.approx(np.abs(guess - targets).mean())
    assert scores["r2"] == pytest.approx(
        1 - np.sum((guess - targets) ** 2) / np.sum((targets - targets.mean()) ** 2)
    )


def test_coxs_loss_and_the_concordance_index_by_their_definitions():
    rng = np.random.default_rng(2)
    times = rng.integers(1, 12, 30).astype(float)  # many ties
    events = rng.integers(0, 2, 30).astype(float)
    risk = np.round(rng.normal(size=30), 1)
    targets = torch.from_numpy(np.stack([times, events], 1))
    got = partial_likelihood(torch.from_numpy(risk), targets).numpy()
    for i in range(30):
        wanted = np.log(np.exp(risk[times >= times[i]]).sum()) - risk[i] if events[i] else 0.0
        assert got[i] == pytest.approx(wanted, abs=1e-12)
    concordant = comparable = 0.0
    for i in range(30):
        for j in range(30):
            if events[i] and (times[i] < times[j] or (times[i] == times[j] and not events[j])):
                comparable += 1
                concordant += (risk[i] > risk[j]) + 0.5 * (risk[i] == risk[j])
    assert concordance(risk, targets.numpy()) == (concordant, comparable)


def test_federated_cox_regression_reaches_the_stratified_optimum(tmp_path):
    """Full batches, one step a round: gradient descent on the sum of the clients' partial likelihoods."""
    rng = np.random.default_rng(3)
    clients = {}
    for name in ("a", "b"):
        x = rng.normal(size=(50, 2)).astype(np.float32)
        times = rng.exponential(np.exp(-x @ np.array([0.8, -0.5])))
        clients[name] = (x, np.stack([times, rng.integers(0, 4, 50) > 0], 1).astype(np.float64))
    data = fedld.Federation.from_arrays(clients, clients["a"], task="survival")
    result = fedld.run(
        "fedavg", data, model="linear", rounds=150, lr=0.5, momentum=0.0, batch_size=50, workers=0,
        eval_every=150, out=tmp_path / "run",
    )  # fmt: skip

    def loss(beta):
        parts = [
            partial_likelihood(torch.from_numpy(x @ beta), torch.from_numpy(y)) for x, y in clients.values()
        ]
        return float(torch.cat(parts).mean())

    best = optimize.minimize(loss, np.zeros(2), method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12})
    weights = dict(result.model.named_parameters())["classifier.0.weight"].detach().numpy()[0]
    assert weights == pytest.approx(best.x, abs=1e-3)


def test_survival_without_comparable_pairs_has_no_concordance():
    task = Survival()
    tally = task.tally(torch.zeros(2, 1), torch.tensor([[1.0, 0.0], [2.0, 0.0]]))
    assert task.scores(tally) == {"count": 2, "concordance": None, "loss": 0.0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_column": None}, "name the target column"),
        ({"target_column": "valeu"}, "no column 'valeu': did you mean 'value'"),
        ({"target_column": "sex"}, "line 2: the target 'sex' has 'm', and a number is needed"),
        ({"target_column": "dose"}, "line 5: the target 'dose' is empty, and a number is needed"),
        ({"site_column": "hospital"}, "no column 'hospital'"),
        ({"split_column": "sex"}, "line 2: 'sex' is 'train', 'test' or empty, not 'm'"),
    ],
)
def test_bad_tables_are_one_sentence(table, change, words, tmp_path):
    with pytest.raises(FedLDError, match=words):
        run(table, "regression", tmp_path / "run", **change)
    assert not (tmp_path / "run").exists()


def test_a_cell_of_several_lines_is_shown_in_one(table, tmp_path):
    """An open quotation mark takes the following lines into its cell."""
    rows = tmp_path / "rows.csv"
    rows.write_text((tmp_path / "patients.csv").read_text().replace(",m,", ',"m\nm",', 1))
    for change in ({"split_column": "sex"}, {"target_column": "sex"}):
        with pytest.raises(FedLDError, match=r"'m\\nm'") as raised:
            run(f"csv:{rows}", "regression", tmp_path / "run", **change)
        assert "\n" not in str(raised.value)


def test_files_that_are_no_tables(tmp_path):
    for text, words in (
        ("a,b\n1,2\n3\n", "line 3: 1 cells under 2 columns"),
        ("a,a\n1,2\n", "two columns 'a'"),
        ("a,b\n", "no rows"),
        ("", "no rows"),
    ):
        (tmp_path / "x.csv").write_text(text)
        with pytest.raises(FedLDError, match=words):
            read_columns(tmp_path / "x.csv")
    (tmp_path / "x.csv").write_bytes(b"a,b\n\xff,1\n")
    with pytest.raises(FedLDError, match="no readable CSV"):
        read_columns(tmp_path / "x.csv")
    many = {"note": [f"text {k}" for k in range(60)]}
    with pytest.raises(FedLDError, match="line 2, column 'note': 'text 0' is no number, and 60 different"):
        make_features(many, tmp_path / "x.csv")
    with pytest.raises(FedLDError, match="row 2: an event is 0 or 1, not 3"):
        fedld.Federation.from_arrays({"a": (np.zeros((2, 1)), np.array([[1.0, 1], [2, 3]]))}, task="survival")


def test_the_example_runs():
    import importlib.util
    from pathlib import Path

    file = Path(__file__).parents[2] / "examples/tasks.py"
    spec = importlib.util.spec_from_file_location("tasks_example", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    results = module.main(rounds=2)
    assert [next(iter(one.rounds[-1]["test"])) for one in results.values()] == ["count"] * 4


COLUMN = {"classification": "p_1", "regression": "predicted", "survival": "predicted"}


def predicted(*arguments):
    result = CliRunner().invoke(app, ["predict", *map(str, arguments)])
    if result.exception:
        raise result.exception
    return list(csv.DictReader(result.stdout.splitlines()))


@pytest.mark.parametrize("task", DROP)
def test_predictions_of_a_table_are_those_of_the_run(table, task, tmp_path):
    run(table, task, tmp_path / "run", rounds=2)
    rows = predicted(tmp_path / "run", table.removeprefix("csv:"))
    assert len(rows) == 120
    told = {row["name"]: float(row[COLUMN[task.partition("-")[0]]]) for row in rows}
    with (tmp_path / "run/predictions.csv").open() as stream:
        measured = {
            row["patient"]: float(row[COLUMN[task.partition("-")[0]]]) for row in csv.DictReader(stream)
        }
    assert len(measured) == 24
    for name, value in measured.items():
        assert told[name] == pytest.approx(value, rel=1e-5, abs=1e-6)


def test_seeds_of_a_study_predict_their_mean_value(table, tmp_path):
    given = settings(table, "regression", rounds=1)
    out = tmp_path / "study"
    fedld.compare(["fedavg"], given.pop("dataset"), seeds=[0, 1], jobs=0, out=out, **given)
    file = table.removeprefix("csv:")
    single = [predicted(path.parent, file) for path in sorted(out.rglob("model.safetensors"))]
    both = predicted(out, file)
    for k in (0, 50, 119):
        mean = np.mean([float(rows[k]["predicted"]) for rows in single])
        assert float(both[k]["predicted"]) == pytest.approx(mean, rel=1e-7)


def test_a_parquet_file_is_the_same_table(table, tmp_path):
    columns = read_columns(tmp_path / "patients.csv")
    typed = {
        "age": [float(cell) for cell in columns["age"]],
        "dose": [float(cell) if cell else None for cell in columns["dose"]],
        "event": [cell == "1" for cell in columns["event"]],
    }
    file = tmp_path / "patients.parquet"
    polars.DataFrame(columns | typed).write_parquet(file)
    results = [
        run(data, "survival", tmp_path / name, rounds=2)
        for data, name in ((table, "csv"), (f"csv:{file}", "parquet"))
    ]
    assert results[0].rounds[-1]["test"] == results[1].rounds[-1]["test"]
    assert len(predicted(tmp_path / "csv", file)) == 120
    file.write_bytes(b"PAR1 no table")
    with pytest.raises(FedLDError, match="no readable parquet file"):
        read_columns(file)
    polars.DataFrame({"a": [[1], [2]]}).write_parquet(file)
    with pytest.raises(FedLDError, match="column 'a' is of List"):
        read_columns(file)


def test_rows_that_do_not_fit_are_one_sentence(table, tmp_path):
    run(table, "regression", tmp_path / "run", rounds=1)
    file = tmp_path / "new.csv"
    for text, words in (
        ("dose,sex\n1,m\n", "new.csv has no column 'age', which the model was trained on"),
        ("age,dose,sex\n60,1,m\nold,1,f\n", "line 3: 'age' has 'old', and a number is needed"),
        ("age,dose,sex\n60,1,x\n", "line 2: 'sex' has 'x', which the model does not know"),
    ):
        file.write_text(text)
        with pytest.raises(FedLDError, match=words):
            predicted(tmp_path / "run", file, "--out", tmp_path / "x.csv")
        assert not (tmp_path / "x.csv").exists()
    file.write_text("sex,other,dose,age\n,z,,\n")  # nothing is known: the means
    assert np.isfinite(float(predicted(tmp_path / "run", file)[0]["predicted"]))
    with pytest.raises(FedLDError, match="There is no file"):
        predicted(tmp_path / "run", tmp_path / "none.csv")


def test_a_site_without_events_and_a_category_of_one_site_are_named(tmp_path):
    rows = [["ab"[k % 2], k, "xyz"[k % 2 + (k == 1)], 1 + k % 7, k % 4 > 1] for k in range(40)]
    data = write(
        tmp_path / "a.csv", [[*row[:4], int(row[4])] for row in rows], ["site", "v", "kind", "time", "event"]
    )
    given = {"target_column": "time,event", "site_column": "site", "task": "survival", "min_size": 5}
    federation = fedld.data(data, **given)
    assert any("only client 'a' has 'kind = x'" in note for note in federation.notes)
    none = write(
        tmp_path / "b.csv",
        [[*row[:4], int(row[0] == "b")] for row in rows],
        ["site", "v", "kind", "time", "event"],
    )
    with pytest.raises(FedLDError, match=r"client .a. has no event among its 1[0-9] training samples"):
        fedld.data(none, **given)


def test_targets_that_are_not_finite_are_named_by_row():
    x, y = np.zeros((4, 2)), np.array([1.0, np.nan, 2.0, 3.0])
    with pytest.raises(FedLDError, match="row 2: the target is missing or not finite"):
        fedld.Federation.from_arrays({"a": (x, y)}, task="regression")
