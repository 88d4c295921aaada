"""Tasks and tables at sites: the same bits as on this machine, and what a site tells of its targets."""

import csv
import json

import numpy as np
import pytest
from safetensors.torch import load_file

from fedld.config.experiment import make_experiment
from fedld.data.columns import SheetColumn, united_features
from fedld.data.table import column_sums
from fedld.engine import loop
from fedld.engine.backends.flower.disclosure import rounded_tally
from fedld.engine.backends.flower.engine import FlowerEngine
from fedld.engine.backends.flower.federation import FileFacts, describe, open_site, told_columns
from fedld.errors import FedLDError
from fedld.records.schema import CLIENTS
from fedld.records.writer import read_lines
from fedld.tasks import TASKS, Tally

SITES = ("alpha", "beta", "gamma")
TARGETS = {
    "classification": "sick",
    "regression": "value",
    "survival": "time,event",
    "multilabel": "sick,event",
    "survival-discrete": "time,event",
}
COMMON = {"rounds": 2, "seed": 3, "lr": 0.1, "batch_size": 8, "model": "linear"}
FLOWER = {"clients": 3, "dry_run": False, "wait_for_clients": 0, "min_clients": "all"}


def write(path, rows):
    with path.open("w", newline="") as stream:
        table = csv.DictWriter(stream, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def patient(rng, k):
    """A row whose dose is missing at two sites only, with a colour that two sites have."""
    site, age, dose = SITES[k % 3], rng.normal(60, 10), rng.normal()
    risk = 0.05 * (age - 60) + dose
    return {
        "age": f"{age:.3f}",
        "dose": "" if k % 7 == 3 and site != "gamma" else f"{dose:.3f}",
        "colour": ["red", "blue"][k % 2] if site == "alpha" else "red" if k % 5 else "green",
        "time": f"{rng.exponential(np.exp(-risk)) + 0.01:.4f}",
        "event": int(k % 4 > 0),
        "sick": int(risk > 0),
        "value": f"{20 + 3 * risk:.3f}",
        "site": site,
        "split": "test" if k % 5 == 2 else "train",
    }


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """One table with all patients, one per site with its columns in another order, and the test rows."""
    monkeypatch.setenv("FEDLD_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    rows = [patient(rng, k) for k in range(150)]
    write(tmp_path / "all.csv", rows)
    for site in SITES:
        own = [dict(reversed(row.items())) for row in rows if row["site"] == site]
        write(tmp_path / f"{site}.csv", own)
    write(tmp_path / "test.csv", [row for row in rows if row["split"] == "test"])
    return tmp_path


def columns(task):
    """Target and dropped columns of a task."""
    target = TARGETS[task]
    others = {"time", "event", "sick", "value"} - set(target.split(","))
    return target, ",".join(sorted(others))


def across_sites(make_grid, tables, task, out="run", **settings):
    target, drop = columns(task)
    grid = make_grid(
        tables,
        ".csv",
        task=TASKS[task].data,
        **{"target-column": target, "split-column": "split", "drop": f"{drop},site"},
    )
    given = COMMON | FLOWER | {"task": task, "dataset": f"csv:{tables}/test.csv", "target_column": target}
    given |= {"site_column": "site", "split_column": "split", "data": {"drop": drop}} | settings
    loop.run(make_experiment(given), tables / out, engine=FlowerEngine(grid, tables / out))
    return tables / out


def on_this_machine(tables, task, **settings):
    target, drop = columns(task)
    given = COMMON | {"task": task, "dataset": f"csv:{tables}/all.csv", "target_column": target, "workers": 0}
    given |= {"site_column": "site", "split_column": "split", "data": {"drop": drop}} | settings
    loop.run(make_experiment(given), tables / "local")
    return tables / "local"


def assert_same_bits(ours, theirs):
    ours, theirs = (load_file(path / "model.safetensors") for path in (ours, theirs))
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value.equal(theirs[key]), key


@pytest.mark.parametrize("task", TARGETS)
def test_a_table_at_sites_gives_the_model_of_this_machine(make_grid, tables, task):
    method = {"regression": "scaffold", "survival": "newton"}.get(task, "fedavg")
    settings = {"method": method, "decompose": 1, "momentum": 0.0}
    ours = on_this_machine(tables, task, **settings)
    theirs = across_sites(make_grid, tables, task, **settings)
    assert_same_bits(ours, theirs)
    assert {line.get("excluded") for line in read_lines(theirs, CLIENTS)} == {None}
    local, remote = (json.loads((path / "federation.json").read_text()) for path in (ours, theirs))
    assert local["mean"] == remote["mean"]
    assert local["std"] == remote["std"]
    if task == "survival":
        assert remote["classes"] == ["censored", "event"]
        assert [one["labels"] for one in remote["clients"]] == [one["labels"] for one in local["clients"]]


def test_sums_of_numbers_at_sites_give_the_solution_of_this_machine(make_grid, tables):
    settings = {"method": "ridge", "train": "head", "rounds": 1}
    ours = on_this_machine(tables, "regression", **settings)
    assert_same_bits(ours, across_sites(make_grid, tables, "regression", **settings))


def test_survival_at_real_sites_gives_the_model_of_this_machine(consortium, tables):
    """Server and sites as processes, each site's table and what its columns mean from its own command."""
    target, drop = columns("survival")
    made = consortium(tables / "consortium", tables, secure=False)
    own = [
        "--task",
        "survival",
        "--target-column",
        target,
        "--split-column",
        "split",
        "--drop",
        f"{drop},site",
    ]
    try:
        made.start_server()
        for site in SITES:
            made.start_site(site, *own, data=tables / f"{site}.csv")
        settings = {"dataset": f"csv:{tables}/test.csv", "task": "survival", "target_column": target}
        settings |= {"site_column": "site", "split_column": "split", "data.drop": drop, "clients": 3}
        settings |= COMMON | {"dry_run": "false"}
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        submitted = made.submit("submitted", "survival", *words)
        assert submitted.wait(200) == 0, made.log("submitted")
    finally:
        made.close()
    assert_same_bits(on_this_machine(tables, "survival"), made.folder / "runs" / "survival")


def pictures(folder, task):
    """Pictures of three sites with masks or several labels; a site has not looked for the second label."""
    rng = np.random.default_rng(1)
    images = rng.integers(0, 255, (90, 16, 16, 1)).astype(np.uint8)
    site = np.array([SITES[k % 3] for k in range(90)])
    split = np.array(["test" if k % 5 == 2 else "train" for k in range(90)])
    labels = rng.integers(0, 2, (90, 2))
    labels[site == "beta", 1] = -1
    key, targets = ("masks", (images[..., 0] > 150).astype(np.uint8))
    names = np.array(["background", "bright"])
    if task == "multilabel":
        key, targets, names = "labels", labels, np.array(["mass", "edema"])

    def save(name, rows, **arrays):
        parts = {"images": images[rows], key: targets[rows], "split": split[rows], "classes": names}
        np.savez(folder / f"{name}.npz", **parts, **arrays)

    save("all", np.arange(90), site=site)
    for name in SITES:
        save(name, np.flatnonzero(site == name))
    test = np.flatnonzero(split == "test")
    save("test", test, site=site[test])


@pytest.mark.parametrize(("task", "model"), [("segmentation", "unet:depth=1"), ("multilabel", "cnn")])
def test_pictures_with_masks_or_labels_at_sites_give_the_model_of_this_machine(
    make_grid, tmp_path, monkeypatch, task, model
):
    monkeypatch.setenv("FEDLD_CACHE", str(tmp_path / "cache"))
    pictures(tmp_path, task)
    common = COMMON | {"model": model, "task": task, "rounds": 1}
    loop.run(
        make_experiment(common | {"dataset": f"npz:{tmp_path}/all.npz", "workers": 0}), tmp_path / "local"
    )
    out = tmp_path / "run"
    given = make_experiment(common | FLOWER | {"dataset": f"npz:{tmp_path}/test.npz"})
    loop.run(given, out, engine=FlowerEngine(make_grid(tmp_path, task=task), out))
    assert_same_bits(tmp_path / "local", out)


def refusals(make_grid, tables, task, name, change):
    """Why a site whose rows were changed is not taken."""
    file = tables / f"{name}.csv"
    with file.open() as stream:
        rows = list(csv.DictReader(stream))
    for row in rows:
        change(row)
    write(file, rows)
    with pytest.raises(FedLDError) as refusal:
        across_sites(make_grid, tables, task)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda row: row.update(age="old"), "it has column 'age' as text, the server as number"),
        (lambda row: row.pop("age"), "it lacks column 'age' of the server's table"),
        (lambda row: row.update(weight=1), "it has column 'weight', which the server's table lacks"),
        (lambda row: row.update(event=0), "it has no event among its 40 training samples"),
    ],
    ids=["kind", "lacking", "more", "events"],
)
def test_columns_that_differ_and_a_site_without_events_are_named(make_grid, tables, change, reason):
    assert reason in refusals(make_grid, tables, "survival", "beta", change)


def test_sites_are_asked_for_the_task_that_their_data_is_for(make_grid, tables):
    grid = make_grid(tables, ".csv", **{"target-column": "sick", "drop": "site,split,time,event,value"})
    given = COMMON | FLOWER | {"task": "regression", "dataset": f"csv:{tables}/test.csv"}
    given |= {"target_column": "value", "data": {"drop": "site,split,time,event,sick"}}
    with pytest.raises(FedLDError, match=r"its data is for classification, not for regression"):
        loop.run(make_experiment(given), tables / "run", engine=FlowerEngine(grid, tables / "run"))


def test_two_sites_that_differ_where_the_server_has_no_cell_are_both_named():
    places = {
        "the server": [SheetColumn(name="age", kind="empty")],
        "site 'a'": [SheetColumn(name="age", kind="text", levels={"old": 9})],
        "site 'b'": [SheetColumn(name="age", kind="number")],
    }
    with pytest.raises(FedLDError, match="site 'a' has column 'age' as text, site 'b' as number"):
        united_features(places)


def test_small_numbers_of_rows_stay_at_the_site(tables):
    facts = FileFacts(
        task="survival", target_column="time,event", split_column="split", drop="sick,value,site"
    )
    table = open_site(str(tables / "beta.csv"), None, facts)
    told = describe(table, "beta", "1", ("risk",), 12)
    by_name = {column.name: column for column in told.columns}
    assert told.label_counts == [None, None]  # 10 of 40 rows are without an event
    assert list(by_name["colour"].levels) == ["red"]
    assert by_name["colour"].levels["red"] is None  # or 40 minus it would tell of the others
    assert by_name["dose"].sums[0] == 40  # 5 missing cells are told of as if they had the site's mean
    few = told_columns([SheetColumn(name="dose", kind="number", missing=True, sums=(3.0, 6.0, 14.0))], 40, 12)
    assert few[0].sums is None
    with pytest.raises(FedLDError, match="survival-discrete needs the number of its events, told from 12 on"):
        describe(table, "beta", "1", ("risk",), 12, asked=TASKS["survival-discrete"])
    server = [SheetColumn(name="colour", kind="text", levels={"green": None})]
    known = describe(table, "beta", "1", ("risk",), 12, server).columns
    assert next(column for column in known if column.name == "colour").levels == {"green": None, "red": None}


def test_sums_that_are_no_counts_leave_rounded():
    tally = rounded_tally(Tally(50, 12.34567, 8.0, {"squared": 123.456789, "known": 40}))
    assert tally.sums == {"squared": pytest.approx(50 * 2.469), "known": 40}


def test_sums_of_a_column_do_not_depend_on_the_others():
    values = np.random.default_rng(0).normal(size=(1001, 3)).astype(np.float32)
    whole = column_sums(values)
    for k in range(3):
        assert np.array_equal(column_sums(values[:, [k]])[:, 0], whole[:, k])
