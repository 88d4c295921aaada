"""What is said of a finished run."""

import os
import platform

import numpy as np
import torch

from fedld.engine.records import Line


def environment() -> Line:
    """The machine and the libraries that computed the result."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }


def summarise(rounds: list[Line]) -> Line:
    """Final, last-five and best accuracy of the global model, and apart, of the personalised ones."""
    out: Line = {}
    for key, prefix in (("accuracy", ""), ("personal_accuracy", "personal_")):
        series = [line[key] for line in rounds if line.get(key) is not None]
        if series:
            out[f"{prefix}final_accuracy"] = series[-1]
            out[f"{prefix}last5_accuracy"] = float(np.mean(series[-5:]))
            out[f"{prefix}best_accuracy"] = max(series)
    last = rounds[-1]
    out |= {f"final_{key}": last.get(key) for key in ("auroc", "balanced_accuracy", "loss", "ece")}
    return out | {key: sum(line[key] for line in rounds) for key in ("bytes_up", "bytes_down")}
