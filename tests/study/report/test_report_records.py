"""Data frames, files and trackers hold what was recorded."""

import json
import threading

import pytest

import fedld
from fedld.errors import FedLDError, Interrupted
from fedld.frames import load
from fedld.study.trackers import Tracking, replay

polars = pytest.importorskip("polars", reason="polars is not installed: pip install 'fedld[analysis]'")


def test_frames_hold_the_records(study):
    frames = load(study)
    assert frames.runs.height == 9
    assert frames.rounds.height == 9 * 8
    assert frames.clients.height == 9 * 8 * 5
    assert frames.cross_loss.height == 9 * 8 * 25
    lines = [json.loads(x) for x in (study / "runs/fedld-seed1/rounds.jsonl").read_text().splitlines()]
    own = frames.rounds.filter((polars.col("label") == "fedld") & (polars.col("seed") == 1))
    assert own["accuracy"].to_list() == [line["test"]["accuracy"] for line in lines]
    cosines = frames.cosines["cosine"]
    assert cosines.min() >= -1
    assert cosines.max() <= 1


@pytest.mark.parametrize("format", ["parquet", "csv"])
def test_files_read_back(study, tmp_path, format):
    frames = load(study / "runs/fedavg-seed0")
    frames.write(tmp_path, format)
    read = polars.read_parquet if format == "parquet" else polars.read_csv
    assert read(tmp_path / f"rounds.{format}")["loss"].to_list() == frames.rounds["loss"].to_list()


def test_an_unknown_format_is_one_sentence(study, tmp_path):
    with pytest.raises(FedLDError, match="unknown format 'xlsx'"):
        load(study).write(tmp_path, "xlsx")


def test_tensorboard_gets_every_scalar(study, tmp_path):
    pytest.importorskip(
        "tensorboard", reason="tensorboard is not installed: pip install 'fedld[tensorboard]'"
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    replay([study / "runs/fedld-seed0"], "tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "fedld-seed0"))
    events.Reload()
    lines = [json.loads(x) for x in (study / "runs/fedld-seed0/rounds.jsonl").read_text().splitlines()]
    found = events.Scalars("shift_loss")
    assert [event.step for event in found] == list(range(1, 9))
    assert [event.value for event in found] == pytest.approx([line["shift_loss"] for line in lines])


class Lines:
    """A tracker that remembers; the last one made is `Lines.newest`."""

    def __init__(self, out, name, settings):
        self.name, self.settings, self.rounds, self.closed = name, settings, [], False
        Lines.newest = self

    def log(self, round, scalars):
        self.rounds.append((round, sorted(scalars)))

    def close(self):
        self.closed = True


def test_a_tracker_follows_a_run_also_over_a_stop(tmp_path):
    settings = {"clients": 2, "rounds": 3, "workers": 0, "out": tmp_path / "run", "progress": False}
    seen = []

    def stop(line, model):
        seen.append(line["round"])
        if line["round"] == 2 and seen == [1, 2]:
            raise KeyboardInterrupt

    callbacks = [Tracking(Lines, tmp_path / "board"), stop]
    with pytest.raises(Interrupted):
        fedld.run("fedavg", "digits", callbacks=callbacks, **settings)
    assert [round_ for round_, _ in Lines.newest.rounds] == [1, 2]
    fedld.run("fedavg", "digits", callbacks=callbacks, resume=True, **settings)
    tracker = Lines.newest
    assert (tracker.name, tracker.settings["rounds"], tracker.closed) == ("run", "3", True)
    assert [round_ for round_, _ in tracker.rounds] == [1, 2, 3]
    assert all("accuracy" in names for _, names in tracker.rounds)


def test_mlflow_store(study, tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'fedld[mlflow]'")
    replay([study / "runs/fedld-seed0"], "mlflow", tmp_path / "store")
    client = mlflow.MlflowClient((tmp_path / "store").resolve().as_uri())
    experiment = client.get_experiment_by_name("fedld").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.data.params["method.name"] == "fedld"
    assert len(client.get_metric_history(run.info.run_id, "accuracy")) == 8


def test_wandb_offline(study, tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'fedld[wandb]'")
    replay([study / "runs/fedld-seed0"], "wandb", tmp_path)
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert threading.active_count() < 50


def test_an_unknown_tracker_is_one_sentence(tmp_path):
    with pytest.raises(FedLDError, match="did you mean 'tensorboard'"):
        Tracking("tensorbord", tmp_path)
