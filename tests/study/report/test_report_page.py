"""The page as text: self-contained, escaped, and there even when records are not."""

import json
import re

import numpy as np
import pytest

from fedld.errors import FedLDError
from fedld.records.reader import read
from fedld.study.report import write_report
from fedld.study.report.build import setting_title
from fedld.study.report.chart import looks, variables
from fedld.study.report.clients import participation_chart
from fedld.study.report.conflict import encode, measured_chart

EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(2)">$x^2$&amp;'


@pytest.fixture(scope="module")
def page(study, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "report.html"
    write_report([study], out)
    return out.read_text()


def test_every_part_is_there(page):
    titles = re.findall(r"<h3>([^<]*)</h3>", page)
    for title in (
        *("Difference to fedavg", "Accuracy", "Which loss term explains it", "AUROC", "Loss"),
        *(
            "Loss decomposition over rounds",
            "Cross loss: every client&#39;s model on every client&#39;s data",
        ),
        *(
            "Update conflict: cosine between clients",
            "Principal spectrum with votes",
            "Labels of every client",
        ),
        *("Accuracy of every client", "Confusion matrix", "Calibration", "Methods", "Cost of a run"),
        *("Accuracy against communication", "Settings"),
    ):
        assert title in titles
    assert "Not shown" not in page
    assert "Clients are split" in page  # a finding of the diagnosis
    assert "fedld compare --out demo" in page


def test_nothing_points_outside(page):
    allowed = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"(?:https?:)?//[a-z][\w.-]+\.[a-z]+[^\s\"'<)]*", page)) <= allowed
    policy = page.replace("&#39;", "'")
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy


def test_names_are_text(make_study, tmp_path):
    path = make_study(tmp_path / "s", seeds=(0, 1), name=EVIL, names=[EVIL + str(i) for i in range(5)])
    index = json.loads((path / "study.json").read_text())
    for run in index["runs"]:
        run["label"] = EVIL if run["method"] == "fedld" else run["label"]
    (path / "study.json").write_text(json.dumps(index))
    write_report([path], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "<img" not in text
    assert "<script>alert" not in text
    assert text.count("</script>") == text.count("<script")


def test_damaged_records_cost_only_their_part(make_study, tmp_path):
    path = make_study(tmp_path / "s", seeds=(0,))
    for run in (path / "runs").iterdir():
        (run / "cross_loss.jsonl").write_text('{"round": 1, "clients": 3}\n{"round": 2}\nnonsense\n')
        (run / "conflict.jsonl").unlink()
        (run / "predictions.json").write_text("[]")
        line = b'{"round":1,"index":0,"client":"a","label_counts":"x"}\n'
        (run / "clients.jsonl").write_bytes(b"\xff\xfe{}\n" + line)
    write_report([path], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "predictions.json is missing" in text
    assert "clients.jsonl: 1 damaged line(s) left out" in text
    assert "conflict.jsonl holds no Gram matrix" in text
    assert "Loss decomposition over rounds" in text


def test_rounds_of_any_type_do_not_stop_the_page(make_run, tmp_path):
    path = make_run(tmp_path / "r")
    lines = [
        {"round": t, "test": {"accuracy": "high", "loss": [1]}, "client_tests": 3, "personal": []}
        for t in (1, 2)
    ]
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report([path], tmp_path / "r.html")
    assert "No verdict yet" in (tmp_path / "r.html").read_text()


def test_an_empty_run_says_what_is_missing(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.toml").write_text("rounds = [")
    write_report([path], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    for problem in ("config.toml is damaged", "rounds.jsonl is missing", "there is no summary.json"):
        assert problem in text


def test_a_damaged_study_index_is_replaced_by_its_runs(make_study, tmp_path):
    path = make_study(tmp_path / "s", seeds=(0,))
    (path / "study.json").write_text("{")
    found = read([path])
    assert any("study.json is damaged" in problem for problem in found.problems)
    assert sorted(run.label for run in found.runs) == ["fedavg", "fedld", "fedprox"]


def test_a_study_cannot_name_files_elsewhere(make_study, make_run, tmp_path):
    path = make_study(tmp_path / "s", seeds=(0,))
    make_run(tmp_path / "other", "secret")
    index = json.loads((path / "study.json").read_text())
    index["runs"][0]["path"] = "../other"
    (path / "study.json").write_text(json.dumps(index))
    found = read([path])
    assert any("lies outside the study" in problem for problem in found.problems)
    assert "secret" not in {run.method for run in found.runs}


def test_the_page_is_the_same_every_time(study, page, tmp_path):
    write_report([study], tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == page


def test_who_was_missing_stands_at_the_top(make_run, tmp_path):
    path = make_run(tmp_path / "r", rounds=4)
    file = path / "clients.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line["index"] == 1 and line["round"] >= 3:
            line["excluded"] = "no answer in time"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report([path], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    sentence = "site 2 is missing from round 3 on (2 of 4 rounds): no answer in time"
    assert text.index(sentence) < text.index("How good is it?")
    chart = participation_chart(read([path]).runs)
    assert ("site 2", 3, "missing", "no answer in time") in chart.rows
    assert ("site 2", 2, "took part", None) in chart.rows


def test_measured_steps_are_shown_round_by_round(make_run, tmp_path):
    path = make_run(tmp_path / "r", rounds=2)
    file = path / "conflict.jsonl"
    trial = {
        "rules": ["mean", "consensus"],
        "lengths": [1.0, 2.0],
        "losses": [0.5, 0.4],
        "errors": [0.0, 0.1],
    }
    trial |= {"votes": {}, "left_out": {}, "fallback": None}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for k, line in enumerate(lines):
        line["trial"] = trial | {"chosen": k, "gain": 0.1 * k}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    chart = measured_chart(read([path]).runs, looks(["fedavg"]))
    assert chart.rows == [("fedavg", 1, "mean", 1.0, 0.0, None), ("fedavg", 2, "consensus", 2.0, 0.1, None)]
    assert "another step than the average in 1 of 2 rounds" in chart.summary


def test_a_site_count_is_that_of_the_data(make_run, tmp_path):
    path = make_run(tmp_path / "r", clients=4)
    (path / "config.toml").write_text(
        (path / "config.toml").read_text().replace("clients = 4", "clients = 5")
    )
    assert "4 clients" in setting_title(read([path]).runs[0])


def test_matrices_keep_three_digits():
    matrix = np.array([[0.12345, np.nan], [1e9, 2.0]])
    import base64

    back = np.frombuffer(base64.b64decode(encode({1: matrix})), "<f2")
    assert back[[0, 3]] == pytest.approx([0.12345, 2.0], rel=1e-3)
    assert np.isnan(back[1])


def test_colours_have_one_name_each():
    light, dark = variables(dark=False), variables(dark=True)
    assert len(set(light.values())) == len(light)
    assert light.keys() == dark.keys()


def test_an_unwritable_page_is_one_sentence(study, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FedLDError, match="cannot write"):
        write_report([study], tmp_path / "file" / "r.html")
