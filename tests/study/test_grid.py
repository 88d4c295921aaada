import json
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from heapq import heappop, heappush
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedld.cli import app, start
from fedld.config.experiment import make_experiment
from fedld.study.grid import Cell, Durations, longest_first
from fedld.study.report import write_report

FEDLD = str(Path(sys.executable).with_name("fedld"))


def test_a_killed_study_leaves_no_process_behind_and_goes_on_at_once(tmp_path):
    out = tmp_path / "study"
    command = [FEDLD, "compare", "--dataset", "digits", "--methods", "fedavg,fedprox", "--seeds", "0"]
    command += ["--clients", "3", "--rounds", "12", "--out", str(out)]
    study = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(out.glob("runs/*/rounds.jsonl")):
        assert study.poll() is None
        time.sleep(0.05)
    study.send_signal(signal.SIGKILL)
    study.wait()
    assert not list(out.glob("runs/*/summary.json"))  # killed in the middle, or this test shows nothing
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list(out.glob("runs/*/summary.json"))) == 2


@pytest.mark.parametrize("jobs", [0, 2])
def test_a_run_that_diverges_does_not_take_the_study_with_it(tmp_path, capsys, monkeypatch, jobs):
    out = tmp_path / "study"
    words = ["--dataset", "digits", "--clients", "3", "--rounds", "2", "--methods", "fedavg,fedprox,central"]
    words += ["--set", "fedprox.lr=1e30", "--seeds", "0,1", "--jobs", str(jobs), "--out", str(out)]
    for again in ([], ["--resume"]):  # the same once more: what failed is tried, and fails again
        monkeypatch.setattr(sys, "argv", ["fedld", "compare", *words, *again])
        with pytest.raises(SystemExit) as ended:
            start()
        assert ended.value.code == 3
        said = capsys.readouterr()
        assert "fedprox-seed0 failed: " in said.err
        warning = "fedprox failed with seeds 0, 1, which the table is without: "
        assert warning in " ".join(said.out.split())
    table = json.loads((out / "table.json").read_text())
    assert [(row["label"], row["seeds"]) for row in table["rows"]] == [
        ("fedavg", [0, 1]),
        ("central", [0, 1]),
    ]
    assert any(line.startswith(warning) and "finite" in line for line in table["warnings"])
    assert warning in (out / "report.html").read_text()


def test_a_run_that_cannot_be_continued_is_missing_aloud(tmp_path, capsys, monkeypatch):
    """It was named on the console only, with exit code 0 and fewer seeds in the table."""
    out = tmp_path / "study"
    words = ["--dataset", "digits", "--clients", "3", "--rounds", "2", "--methods", "fedavg,fedprox"]
    words += ["--seeds", "0,1", "--jobs", "0", "--out", str(out)]

    def compare(*more):
        monkeypatch.setattr(sys, "argv", ["fedld", "compare", *words, *more])
        with pytest.raises(SystemExit) as ended:
            start()
        return ended.value.code

    def files(folder):
        return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}

    assert not compare()
    damaged = out / "runs/fedprox-seed1"
    (damaged / "summary.json").unlink()  # as if stopped in the middle, its checkpoints lost
    shutil.rmtree(damaged / "checkpoints")
    before = files(damaged)
    capsys.readouterr()
    assert compare("--resume") == 3
    assert files(damaged) == before
    warning = "fedprox failed with seed 1, which the table is without: no checkpoint"
    assert warning in " ".join(capsys.readouterr().out.split())
    assert any(line.startswith(warning) for line in json.loads((out / "table.json").read_text())["warnings"])
    table = (out / "table.md").read_text()
    assert "| seeds |" in table
    assert "| 1 of 2 |" in table
    assert warning in (out / "report.html").read_text()
    write_report([out], out / "again.html")  # from the folder alone
    assert warning in (out / "again.html").read_text()
    shutil.rmtree(damaged)
    assert not compare("--resume"), "run anew, it is there again"
    assert not (out / "failed.json").exists()
    assert "| seeds |" not in (out / "table.md").read_text()


def test_a_study_that_goes_on_with_more_seeds_is_one_study(tmp_path):
    """Its index kept the first seeds, so the page and the card of the folder were without the others."""
    out = tmp_path / "study"
    words = [
        "compare",
        "--dataset",
        "digits",
        "--clients",
        "3",
        "--rounds",
        "1",
        "--jobs",
        "0",
        "--out",
        str(out),
    ]

    def seeds_of_index(*more):
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exit_code == 0, done.output
        return [(run["label"], run["seed"]) for run in json.loads((out / "study.json").read_text())["runs"]]

    assert seeds_of_index("--methods", "fedavg", "--seeds", "0") == [("fedavg", 0)]
    both = [("fedavg", 0), ("fedprox", 0), ("fedavg", 1), ("fedprox", 1)]
    assert seeds_of_index("--methods", "fedavg,fedprox", "--seeds", "0,1", "--resume") == both
    assert seeds_of_index("--methods", "fedavg", "--seeds", "0", "--resume") == both, "a part of it"
    (out / "study.json").write_text("damaged")
    assert seeds_of_index("--methods", "fedavg", "--seeds", "0,1", "--resume") == both[::2]


def test_a_study_of_a_version_without_a_setting_is_finished(tmp_path):
    """Settings are compared by value: one that is newer than the study had its default."""
    out = tmp_path / "study"
    words = ["--dataset", "digits", "--clients", "3", "--rounds", "1", "--methods", "fedavg,fedprox"]
    command = ["compare", *words, "--seeds", "0", "--jobs", "0", "--out", str(out)]
    assert CliRunner().invoke(app, command).exit_code == 0
    config = out / "runs/fedavg-seed0/config.toml"
    kept = [line for line in config.read_text().splitlines() if not line.startswith(("lr_warmup", "moments"))]
    assert len(kept) < len(config.read_text().splitlines())  # as an older version would have written it
    config.write_text("\n".join(kept) + "\n")
    shutil.rmtree(out / "runs/fedprox-seed0")
    done = CliRunner().invoke(app, [*command, "--resume"])
    assert done.exit_code == 0, done.output
    config.write_text("\n".join(kept).replace("rounds = 1", "rounds = 1\npatience = 7") + "\n")
    other = CliRunner().invoke(app, [*command, "--resume"])
    assert "other settings" in str(other.exception)


def test_a_study_whose_runs_all_fail_is_an_error(tmp_path, capsys, monkeypatch):
    words = ["--dataset", "digits", "--clients", "3", "--rounds", "2", "--methods", "fedavg", "--lr", "1e30"]
    monkeypatch.setattr(
        sys, "argv", ["fedld", "compare", *words, "--seeds", "0", "--jobs", "0", "--out", str(tmp_path / "s")]
    )
    with pytest.raises(SystemExit) as ended:
        start()
    assert ended.value.code == 2
    assert "finite" in capsys.readouterr().err.splitlines()[-1]


def cells(seeds, **seconds):
    """Runs of methods with several seeds, in the order of a study, and how long each takes."""
    return [
        (
            Cell(
                label=label,
                experiment=make_experiment({"seed": seed, "rounds": 4}),
                path=Path(f"{label}-{seed}"),
            ),
            duration,
        )
        for seed in range(seeds)
        for label, duration in seconds.items()
    ]


def test_a_run_of_every_method_comes_first_then_the_longest():
    grid = cells(3, short=1.0, long=5.0, middle=2.0)
    durations = {cell.path: duration for cell, duration in grid}
    begun = []

    def work(cell):
        begun.append(str(cell.path))
        return {"seconds": durations[cell.path], "rounds": 4}

    with ThreadPoolExecutor(1) as pool:
        found = longest_first([cell for cell, _ in grid], lambda: 1, lambda cell: pool.submit(work, cell))
    assert [one["seconds"] for one in found] == [duration for _, duration in grid]
    rest = ["long-1", "long-2", "middle-1", "middle-2", "short-1", "short-2"]
    assert begun == ["short-0", "long-0", "middle-0", *rest]


def test_two_cores_are_busy_to_the_end():
    """Time is counted, not waited for: 20 runs of some ten seconds end within a tenth of the best."""
    grid = cells(5, fedavg=10.0, fedprox=11.0, fedpac=14.0, scaffold=12.0)
    durations, running, clock, waiting = Durations(), [], 0.0, dict(enumerate(grid))
    while waiting or running:
        while waiting and len(running) < 2:
            chosen = durations.next_of({i: cell for i, (cell, _) in waiting.items()})
            heappush(running, (clock + waiting[chosen][1], chosen))
            del waiting[chosen]
        clock, done = heappop(running)
        cell, seconds = grid[done]
        durations.learn(cell, {"seconds": seconds, "rounds": 4})
    assert clock <= 1.1 * sum(seconds for _, seconds in grid) / 2


STUDY = """
import fedld
{own}
study = fedld.compare({methods}, "digits", clients=2, rounds=1, seeds=[0, 1], jobs=2)
print("runs:", len(study.results))
"""
OWN = """
from dataclasses import dataclass
from fedld.methods import FedAvg
@dataclass(frozen=True)
class Mine(FedAvg):
    pass
"""


@pytest.mark.parametrize(
    ("methods", "own", "says"),
    [
        ('["fedavg"]', "", ""),
        ('{"mine": Mine()}', OWN, 'defined in a script without `if __name__ == "__main__":`: the runs stay'),
    ],
)
def test_a_script_without_a_main_guard_runs_a_study(tmp_path, methods, own, says):
    (tmp_path / "script.py").write_text(STUDY.format(methods=methods, own=own))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "runs: 2\n", done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
