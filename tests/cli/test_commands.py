"""The commands as a user types them, in real processes where exit codes matter."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedld.cli import app, start

FEDLD = str(Path(sys.executable).with_name("fedld"))


def refused(*arguments: str) -> str:
    """The one sentence of a refusal."""
    done = subprocess.run([FEDLD, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def small(**changes: object) -> list[str]:
    settings = {"dataset": "digits", "rounds": 2, "clients": 3} | changes
    return [part for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", str(value))]


def test_run_writes_records_and_prints_json(tmp_path):
    out = tmp_path / "run"
    result = CliRunner().invoke(app, ["run", *small(workers=0), "--seed", "3", "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.strip().splitlines()[-1])
    assert summary["seed"] == 3
    written = json.loads((out / "summary.json").read_text())
    written.pop("digest")  # the checksum of the file
    assert summary == written | {"path": str(out)}


def test_a_config_file_options_and_set_apply_in_that_order(tmp_path):
    config = tmp_path / "experiment.toml"
    config.write_text('dataset = "digits"\nrounds = 5\nlr = 0.5\n[method]\nname = "fedprox"\nmu = 0.3\n')
    out = tmp_path / "run"
    options = ["--config", str(config), "--rounds", "1", "--set", "lr=0.25", "--set", "method.mu=0.7"]
    result = CliRunner().invoke(app, ["run", *options, "--workers", "0", "--out", str(out)])
    assert result.exit_code == 0, result.output
    saved = (out / "config.toml").read_text()
    assert "rounds = 1\n" in saved
    assert "lr = 0.25" in saved
    assert "mu = 0.7" in saved


def test_compare_makes_table_and_report_on_equal_conditions(tmp_path):
    out = tmp_path / "study"
    command = [
        "compare",
        "--methods",
        "fedavg,fedprox",
        "--seeds",
        "0,1",
        *small(rounds=1),
        "--out",
        str(out),
    ]
    done = subprocess.run([FEDLD, *command, "--json"], capture_output=True, text=True, check=True)
    table = json.loads(done.stdout.strip().splitlines()[-1])
    assert [row["label"] for row in table["rows"]] == ["fedavg", "fedprox"]
    assert (
        table["rows"][1]["interval"][0] <= table["rows"][1]["difference"] <= table["rows"][1]["interval"][1]
    )
    assert {"table.json", "table.md", "report.html", "study.json"} <= {p.name for p in out.iterdir()}
    for seed in (0, 1):  # the same partition for both methods
        counts = []
        for method in ("fedavg", "fedprox"):
            lines = (out / f"runs/{method}-seed{seed}/clients.jsonl").read_text().splitlines()
            counts.append([json.loads(line)["label_counts"] for line in lines])
        assert counts[0] == counts[1]
    assert "already holds a study" in refused(*command)
    again = subprocess.run(
        [FEDLD, *command, "--json", "--resume"], capture_output=True, text=True, check=True
    )
    assert json.loads(again.stdout.strip().splitlines()[-1]) == table
    assert "other settings" in refused(*command, "--resume", "--lr", "0.3")
    shutil.rmtree(out / "runs/fedprox-seed1")
    finish = ["compare", "--resume", str(out), "--jobs", "0", "--json"]
    alone = json.loads(CliRunner().invoke(app, finish).stdout.strip().splitlines()[-1])
    assert [row["final"] for row in alone["rows"]] == [row["final"] for row in table["rows"]]
    for words, sentence in (
        (["--resume", str(out), "--lr", "0.3"], "give --resume, and no settings"),
        (["--resume", str(tmp_path)], "holds no study to finish"),
    ):
        assert sentence in str(CliRunner().invoke(app, ["compare", *words]).exception)


def test_what_is_asked_for_and_not_there_is_said_once(tmp_path):
    """Clients where the data names them, BatchNorm to keep where there is none."""
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 8), np.uint8)
    sites = np.array(["north", "south"])[np.arange(60) // 30]
    np.savez(tmp_path / "own.npz", images=images, labels=np.arange(60) % 2, site=sites)
    options = ["--dataset", f"npz:{tmp_path}/own.npz", "--rounds", "1", "--jobs", "0"]
    words = ["compare", "--clients", "5", "--methods", "fedbn,central", "--seeds", "0,1", *options]
    said = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "study")])
    assert said.exit_code == 0, said.output
    assert said.output.count("clients = 5 is not used: the data names its 2 clients") == 1
    assert said.output.count("method 'fedbn' keeps nothing with the clients here: network 'cnn'") == 1


def test_debug_shows_where_an_own_method_failed(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom fedld.methods import FedAvg\n\n@dataclass(frozen=True)\n"
        "class Mine(FedAvg):\n    def client_update(self, client):\n"
        "        raise ValueError('a bug of mine')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["run", *small(rounds=1, workers=0, method="mine:Mine"), "--out"]
    for shown, asked in ((False, ["fedld"]), (True, ["fedld", "--debug"])):
        monkeypatch.setattr(sys, "argv", [*asked, *words, str(tmp_path / f"run{shown}")])
        with pytest.raises(SystemExit) as ended:
            start()
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert ("raise ValueError('a bug of mine')" in said) is shown
        assert said.strip().splitlines()[-1].startswith("fedld: client 'client_1' failed in round 1")


def test_data_shows_the_partition(tmp_path):
    png = tmp_path / "clients.png"
    result = CliRunner().invoke(app, ["data", *small(), "--png", str(png)])
    assert result.exit_code == 0, result.output
    assert "client_1" in result.stdout
    assert png.read_bytes().startswith(b"\x89PNG")
    facts = json.loads(CliRunner().invoke(app, ["data", *small(), "--json"]).stdout)
    assert sum(client["train"] for client in facts["clients"]) == facts["train"]


def test_methods_lists_every_method():
    listed = json.loads(CliRunner().invoke(app, ["methods", "--json"]).stdout)
    assert {"fedavg", "fedprox", "fedbn", "fedpac", "fedgh", "scaffold", "fedld"} <= {
        m["name"] for m in listed
    }


def test_bad_input_ends_the_process_with_one_sentence_and_exit_code_2(tmp_path):
    words = ["run", "--method", "fedpox", "--out", str(tmp_path / "run")]
    assert "unknown method 'fedpox': did you mean 'fedprox'?" in refused(*words)
    assert not (tmp_path / "run").exists()


def test_a_corrupt_npz_is_named(tmp_path):
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04 not really")
    assert "torn.npz" in refused("data", "--dataset", f"npz:{tmp_path}/torn.npz")
