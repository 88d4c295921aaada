"""The end of a run: the final model, its predictions, and the summary that marks the run as finished.

With masks, cases.npz has the best, the median and the worst test case of every site, one entry for each
case: `pictures` (N, H, W, C), `truth` and `predicted` (N, H, W) of class numbers, `site`, `name`, `rank`
(best, median or worst), `dice`; and `classes`, the names of classes.
"""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedld import __version__
from fedld.engine.checkpoint import seal_best
from fedld.engine.exchange import Exchange
from fedld.engine.hardware import environment
from fedld.engine.jobs import Setup, SiteTestJob
from fedld.engine.measure import origin_of_tests, output_names, picture_predictions, predictions
from fedld.engine.network import exported, parameters
from fedld.records.schema import (
    CASES,
    CLIENTS,
    FORMAT,
    ROUNDS,
    CaseMeasures,
    ClientLine,
    FinalMeasures,
    ParticipationRecord,
    RoundLine,
    SeriesScores,
    SiteMeasures,
    Summary,
    Which,
)
from fedld.records.writer import dump, each_line, read_lines, write_atomically
from fedld.tasks.measure import Measure, Scores, finite_values, last_mean
from fedld.tasks.segmentation import Segmentation


def finish(exchange: Exchange, provenance: Callable[[], dict[str, str]], seconds: float) -> Summary:
    """Write model, predictions and summary; the summary comes last."""
    setup, state, path = exchange.setup, exchange.state, exchange.directory.path
    experiment, logits = setup.experiment, exchange.memory.logits
    sites, cases = at_sites(exchange)  # the last exchange: provenance ends the ledger
    if setup.method.has_global:
        origin = provenance()
        write_atomically(path / "model.safetensors", model_file(setup, state.server.weights, origin))
        seal_best(path, origin)
        write_atomically(path / "predictions.csv", picture_predictions(setup, logits).encode())
        if setup.task.dense:
            write_atomically(path / CASES, case_file(setup, logits))
        if setup.task.name == "classification":
            write_atomically(path / "predictions.json", dump(predictions(setup, logits)).encode())
    measures = {measure.name: measure for measure in (*setup.task.measures, *setup.metrics.values())}
    summary: Summary = {
        **summarise(read_lines(path, ROUNDS), measures),
        "format": FORMAT,
        "participation": participation(each_line(path, CLIENTS)),
        "sites": sites,
        "cases": cases,
        "rounds": state.round,
        "seconds": seconds,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "method": experiment.method["name"],
        "dataset": experiment.dataset,
        "model": experiment.model,
        "parameters": parameters(experiment, setup.federation, setup.layout),
        "trained_parameters": setup.layout.trainable,
        "private_parameters": setup.layout.trainable - setup.layout.shared,
        "clients": len(setup.sizes),
        "max_update_ratio": setup.method.max_update_ratio,
        "seed": experiment.seed,
        "version": __version__,
        "environment": environment(),
        "sha256": exchange.directory.checksums(),
    }
    exchange.directory.write_summary(summary)
    return summary


def model_file(setup: Setup, weights: Tensor, facts: dict[str, str]) -> bytes:
    """Give a global model as a file that says how to use it, and some facts."""
    return exported(
        setup.experiment, setup.federation, layout=setup.layout, weights=weights, provenance=facts
    )


AtSites = tuple[dict[str, dict[Which, SiteMeasures]], dict[str, dict[Which, CaseMeasures]]]


def at_sites(exchange: Exchange) -> AtSites:
    """Give the final models on every client's own test set, as far as the clients have any and tell.

    Returns:
        By client and model: shares of right answers; means over cases, where every case has a value.
    """
    if exchange.setup.transforms.sums_only is not None:
        return {}, {}  # what a single client measures does not leave it
    exchange.publish()
    participants = exchange.setup.federation.clients
    clients = [client.name for client in participants if len(client.test) or client.elsewhere]
    results = exchange.do({client: SiteTestJob(exchange.incoming(client)) for client in clients})
    shares = {
        client: {which: cast(SiteMeasures, measures.to_json()) for which, measures in result.models.items()}
        for client, result in results.items()
        if result.models
    }
    means = {
        client: {which: cast(CaseMeasures, measures.to_json()) for which, measures in result.cases.items()}
        for client, result in results.items()
        if result.cases
    }
    return shares, means


def participation(lines: Iterable[ClientLine]) -> dict[str, ParticipationRecord]:
    """Say who was drawn how often, took part how often, and why not; `gone_since` if missing to the end."""
    out: dict[str, ParticipationRecord] = {}
    for line in lines:
        record = out.setdefault(
            line["client"], {"drawn": 0, "took_part": 0, "missing": {}, "gone_since": None}
        )
        record["drawn"] += 1
        if "reason" in line:
            record["missing"][line["reason"]] = record["missing"].get(line["reason"], 0) + 1
            record["gone_since"] = record["gone_since"] or line["round"]
        else:
            record["took_part"] += 1
            record["gone_since"] = None
    return out


def summarise(rounds: Sequence[RoundLine], measures: Mapping[str, Measure]) -> FinalMeasures:
    """Summarise final, last-five and best scores of the global model, and apart, of the personalised ones."""
    out: FinalMeasures = {
        "bytes_up": sum(line["bytes_up"] for line in rounds),
        "bytes_down": sum(line["bytes_down"] for line in rounds),
    }
    if tests := [line["test"] for line in rounds if "test" in line]:
        out["test"] = over_rounds(tests, measures)
    if personal := [line["personal"] for line in rounds if "personal" in line]:
        out["personal"] = over_rounds(personal, measures)
    losses = {line["round"]: line["validation"].get("loss") for line in rounds if "validation" in line}
    finite = {round_: loss for round_, loss in losses.items() if loss is not None}
    if finite:
        best = min(finite, key=finite.__getitem__)
        test: Scores = next(line.get("test", {}) for line in rounds if line["round"] == best)
        out["validated"] = {"round": best, "test": test}
    return out


def over_rounds(lines: Sequence[Scores], measures: Mapping[str, Measure]) -> SeriesScores:
    """Give the last scores as they are; the mean of the last five and the best value of every measure."""
    last5: Scores = {}
    best: Scores = {}
    for name, measure in measures.items():
        values = finite_values([scores.get(name) for scores in lines])
        if values:
            last5[name] = last_mean(values)
            best[name] = measure.best(values)
    return {"final": lines[-1], "last5": last5, "best": best}


MOST_SITES = 24
"""Most sites with cases in the file: a page has room for no more."""
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
    chosen = []
    for site in sorted(set(sites))[:MOST_SITES]:
        rows = np.flatnonzero(np.array(sites) == site)
        order = rows[np.argsort(-dice[rows], kind="stable")]
        ranks = {"best": 0}
        if len(order) > 2:
            ranks["median"] = len(order) // 2
        if len(order) > 1:
            ranks["worst"] = len(order) - 1
        chosen += [(int(order[k]), rank) for rank, k in ranks.items()]
    return chosen
