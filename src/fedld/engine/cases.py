"""The best, the median and the worst test case of every site, with their pictures and masks: cases.npz.

Arrays of the file, one entry for each case: `pictures` (N, H, W, C), `truth` and `predicted` (N, H, W) of
class numbers, `site`, `name`, `rank` (best, median or worst), `dice`; and `classes`, the names of classes.
"""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedld.engine.jobs import Setup
from fedld.engine.measure import origin_of_tests, output_names
from fedld.tasks.segmentation import Segmentation

MOST_SITES = 24
"""Sites whose cases are kept: a page shows no more."""
FAILED = 255
"""Predicted class of a pixel where the model gave no finite number."""


def case_file(setup: Setup, logits: Tensor) -> bytes:
    """Give the content of cases.npz.

    Args:
        setup: of the run.
        logits: outputs of the final global model on the test set.
    """
    f, task = setup.federation, setup.task
    assert isinstance(task, Segmentation)
    truth = np.array(f.labels[f.test])
    dice = task.case_values(logits, truth, output_names(f))["dice"]
    names, sites = origin_of_tests(f)
    chosen = chosen_cases(dice, sites)
    at = np.array([row for row, _ in chosen], np.int64)
    predicted = task.masks(logits[at])
    arrays: dict[str, NDArray[Any]] = {
        "pictures": np.array(f.images[f.test[at]]),
        "truth": truth[at].astype(np.uint8),
        "predicted": np.where(predicted < 0, FAILED, predicted).astype(np.uint8),
        "site": np.array([sites[row] for row in at], np.str_),
        "name": np.array([names[row] for row in at], np.str_),
        "rank": np.array([rank for _, rank in chosen], np.str_),
        "dice": dice[at],
        "classes": np.array(output_names(f), np.str_),
    }
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    return content.getvalue()


def chosen_cases(dice: NDArray[np.float64], sites: Sequence[str]) -> list[tuple[int, str]]:
    """Choose the best, the median and the worst case of every site: row and rank, by site.

    A site with two cases has no median, one with a single case has only a best one.

    >>> chosen_cases(np.array([0.1, 0.9, 0.5, 0.7]), ["a", "a", "a", "b"])
    [(1, 'best'), (2, 'median'), (0, 'worst'), (3, 'best')]
    """
    found = []
    for site in sorted(set(sites))[:MOST_SITES]:
        rows = np.flatnonzero(np.array(sites) == site)
        order = rows[np.argsort(-dice[rows], kind="stable")]
        ranks = {"best": 0}
        if len(order) > 2:
            ranks["median"] = len(order) // 2
        if len(order) > 1:
            ranks["worst"] = len(order) - 1
        found += [(int(order[k]), rank) for rank, k in ranks.items()]
    return found
