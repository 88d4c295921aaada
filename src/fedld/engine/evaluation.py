"""What a model is worth: the global one on the test set, the personalised ones beside it."""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedld.analysis.metrics import calibration, confusion, evaluate_logits
from fedld.engine.records import Line
from fedld.engine.work import Incoming, Job, Personal, PersonalJob, Setup, TestJob

TEST_CHUNK = 512


def evaluation_jobs(setup: Setup, round_: int, incoming: list[Incoming]) -> list[Job]:
    """Jobs that evaluate the model after a round, if one is due; `incoming` has every client once."""
    experiment, method = setup.experiment, setup.method
    if round_ % experiment.eval_every and round_ != experiment.rounds:
        return []
    tests = len(setup.federation.test) if method.has_global else 0
    jobs: list[Job] = [TestJob(s, min(s + TEST_CHUNK, tests)) for s in range(0, tests, TEST_CHUNK)]
    return jobs + [PersonalJob(one) for one in incoming if method.personalised]


def evaluation_line(setup: Setup, jobs: list[Job], results: list[Any], logits: Tensor) -> Line:
    """Measures of the evaluation; the global and the personalised ones under different names."""
    line: Line = {}
    if any(isinstance(job, TestJob) for job in jobs):
        line |= evaluate_logits(logits, test_labels(setup)) | _by_client(setup, logits)
    return line | _personal([r for r in results if isinstance(r, Personal)])


def predictions(setup: Setup, logits: Tensor) -> Line:
    """Confusion matrix and calibration of the final global model."""
    labels = test_labels(setup)
    found = calibration(logits, labels)
    return {
        "classes": list(setup.federation.classes),
        "confusion": confusion(logits, labels).tolist(),
        "calibration": {
            "confidence": found.confidence.tolist(),
            "accuracy": found.accuracy.tolist(),
            "count": found.count.tolist(),
            "ece": found.ece,
        },
    }


def test_labels(setup: Setup) -> Tensor:
    """Labels of the global test set."""
    return torch.from_numpy(np.array(setup.federation.labels[setup.federation.test]))


def _by_client(setup: Setup, logits: Tensor) -> Line:
    """Accuracy of the global model on each client's own test set, where there are any."""
    right = (logits.argmax(1) == test_labels(setup)).numpy()
    own = {
        client.name: float(right[np.isin(setup.federation.test, client.test)].mean())
        for client in setup.federation.clients
        if len(client.test)
    }
    return {"client_accuracy": own} if own else {}


def _personal(results: list[Personal]) -> Line:
    """Mean over clients of the personalised models on the global test set, and on their own."""
    line: Line = {}
    # A site far away measures its model on its own test set only: the global one is the server's.
    if accuracies := [cast(float, r.metrics["accuracy"]) for r in results if "accuracy" in r.metrics]:
        line |= {"personal_accuracy": float(np.mean(accuracies)), "personal_worst": min(accuracies)}
    own = [r.own_accuracy for r in results if r.own_accuracy is not None]
    return line | ({"personal_own_accuracy": float(np.mean(own))} if own else {})
