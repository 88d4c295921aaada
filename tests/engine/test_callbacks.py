"""Callbacks: their three moments, a plain function, and patience, also over a stop."""

import pytest

import fedld
from fedld.engine.loop import resume, run
from fedld.errors import FedLDError, Interrupted


class Moments(fedld.Callback):
    """Write down what is called."""

    def __init__(self):
        self.seen = []

    def begin(self, experiment, out):
        self.seen.append(("begin", experiment.rounds, out.exists()))

    def after_round(self, line, model):
        self.seen.append((line["round"], sum(p.numel() for p in model.parameters()) > 0))
        return line["round"] == 2

    def end(self, summary):
        self.seen.append(("end", summary["rounds"]))


def test_an_own_callback_is_one_class(tmp_path):
    moments = Moments()
    fedld.run("fedavg", "digits", clients=3, rounds=4, workers=0, callbacks=[moments], out=tmp_path / "run")
    assert moments.seen == [("begin", 4, True), (1, True), (2, True), ("end", 2)]


def test_patience_ends_a_run_that_gains_nothing(small, tmp_path):
    settings = {"rounds": 9, "validation": 0.2, "lr": 1e-12, "patience": 3}
    summary = run(small(**settings), tmp_path / "whole")
    assert summary["rounds"] < 9

    def stop(event):
        if event["event"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        run(small(**settings), tmp_path / "stopped", progress=stop)
    assert resume(tmp_path / "stopped")["rounds"] == summary["rounds"]


def test_patience_without_validation_images_is_refused(small, tmp_path):
    with pytest.raises(FedLDError, match="patience goes by the loss on validation images"):
        run(small(patience=2), tmp_path / "run")
    assert not (tmp_path / "run").exists()
