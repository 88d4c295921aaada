"""The verbs of the package: run, compare, auto, tune, diagnose, predict, report; also of the command line."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedld.aggregation import Rule
from fedld.analysis.diagnosis.page import Diagnosis, diagnose_federation, diagnose_run
from fedld.config.experiment import SETTINGS, Experiment, make_experiment
from fedld.data import DataSpec, Federation
from fedld.engine import loop
from fedld.engine.backends.base import Engine
from fedld.engine.backends.machine import SIMULATION, as_engine
from fedld.engine.callbacks import Callback, Function, as_callback
from fedld.engine.ensemble import load_predictor
from fedld.engine.ensemble import predict as predict_samples
from fedld.engine.exchange import Progress
from fedld.errors import FedLDError
from fedld.frames import data_frame
from fedld.local import Objective
from fedld.methods import Method
from fedld.paths import user_path
from fedld.results import Result, Study
from fedld.study.auto import AutoResult
from fedld.study.auto import auto as search
from fedld.study.cluster import check_client
from fedld.study.compare import check_own_tables, plan, run_study
from fedld.study.grid import Cell, run_cell
from fedld.study.progress import RunBars, console
from fedld.study.report import write_figures, write_report
from fedld.study.tune import SearchRange, Tuned, Value
from fedld.study.tune import tune as search_settings
from fedld.tasks import Metric

Named = str | dict[str, Any]
"""A name, or a table of a name and options: {"name": "fedprox", "mu": 0.1}."""
Metrics = Sequence[str | Metric | Callable[..., Any]] | Mapping[str, Metric | Callable[..., Any]]
"""Measures: names and values in a list, or values by name."""
Data = Federation | DataSpec | str | Mapping[str, Any] | Callable[..., Federation]


def run(
    method: Named | Method | type[Method] = "fedavg",
    federation: Data = "fundus-sim",
    *,
    model: str | nn.Module | Callable[..., nn.Module] = "cnn",
    objective: Named | Objective | Callable[..., Any] | None = None,
    rule: Named | Rule | type[Rule] | None = None,
    metrics: Metrics = (),
    callbacks: Sequence[Callback | Function] = (),
    engine: Engine | str = "local",
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Train one method on one federation.

    Args:
        method: name of a method, a table of its name and options, or a `fedld.Method`.
        federation: name of a dataset, a `fedld.Federation`, settings of one, or a function that makes one.
        model: name of a network, an `nn.Module` (trained from the weights it has), or a function that makes
            one (called with the run's seed).
        objective: what clients minimise, by name or as a function of (logits, labels); default: the method's.
        rule: how the server combines updates, by name or as a `fedld.Rule`; default: the method's.
        metrics: further measures, names or functions of (logits, labels) in a list, or `Metric`s by name.
        callbacks: `fedld.Callback`s, or functions of a round's record and model; True ends the run.
        engine: where clients train: "local" (by the setting `workers`), "process", "workers",
            "flower-simulation", or an own `fedld.Engine`.
        out: folder of the run's records; None: a temporary one, which is removed with the result.
        resume: continue the run that is in `out`.
        progress: whether to show a progress bar; default: on terminals and in notebooks.
        settings: further settings of an experiment (`rounds`, `lr`, `decompose`, `workers`, ...).

    Returns:
        The finished run.

    Raises:
        FedLDError: a name, option or setting is wrong, or the run cannot be done.

    >>> import fedld
    >>> result = fedld.run("fedavg", fedld.data("digits", clients=3), rounds=1, workers=0)
    >>> result.summary["rounds"], result.summary["clients"]
    (1, 3)
    """
    if not isinstance(callbacks, Sequence):
        raise FedLDError(f"callbacks is a list of functions, not {callbacks!r:.80}")
    for callback in callbacks:
        as_callback(callback)
    if engine != SIMULATION:
        engine = as_engine(engine)
    parts = {"method": method, "model": model, "objective": objective, "rule": rule, "metrics": metrics}
    experiment = make_experiment(_settings(federation, parts, settings), _own_data(federation, settings))
    with _folder(out) as (path, owned):
        label = experiment.method["name"].rpartition(":")[2]
        with _watched(experiment.rounds, label, progress) as watch:
            if isinstance(engine, str):
                _simulate(experiment, path, watch, callbacks, resume=resume)
            elif resume:
                run_cell(Cell(label=label, experiment=experiment, path=path, engine=engine), watch, callbacks)
            else:
                loop.run(experiment, path, progress=watch, callbacks=callbacks, engine=engine)
    return Result(path, label, experiment, owned)


def _simulate(
    experiment: Experiment,
    path: Path,
    progress: Progress,
    callbacks: Sequence[Callback | Function],
    resume: bool,
) -> None:
    """Run in Flower's simulation. Its sites have files and names, and no values of this process."""
    for kind in experiment.own:
        raise FedLDError(f"engine '{SIMULATION}' takes parts by name: {kind} is a value of your own")
    from fedld.engine.backends.flower.simulation import simulate

    begun = resume and (path / "config.toml").exists()
    simulate(experiment, path, progress, resume=begun, callbacks=callbacks)


def compare(
    methods: Sequence[Named | Method] | Mapping[str, Named | Method],
    federation: Data = "fundus-sim",
    *,
    seeds: Sequence[int] | None = None,
    folds: int | None = None,
    model: str | nn.Module | Callable[..., nn.Module] = "cnn",
    objective: Named | Objective | Callable[..., Any] | None = None,
    rule: Named | Rule | type[Rule] | None = None,
    metrics: Metrics = (),
    primary: str | None = None,
    target: float | str = 0.5,
    engine: Engine | str = "local",
    out: str | Path | None = None,
    resume: bool = False,
    jobs: int | None = None,
    executor: Any = None,
    progress: bool | None = None,
    **settings: Any,
) -> Study:
    """Train several methods with several seeds on the same partitions and initial weights.

    Args:
        methods: methods as in `fedld.run`; a mapping gives them the labels of the table. The first one is the
            baseline.
        federation: data, as in `fedld.run`.
        seeds: seeds of every method; default: 0, 1 and 2, with `folds` only 0.
        folds: parts of a cross-validation; each consists of whole patients and is tested once.
        model: network, as in `fedld.run`.
        objective: objective of all methods; default: each method's own.
        rule: rule of all methods; default: each method's own.
        metrics: further measures, as in `fedld.run`.
        primary: measure that decides; default: the task's first.
        target: points within the baseline's final accuracy, or "0.5@85" for a given one. The table has the
            rounds, megabytes and seconds that a method needs until it stays there.
        engine: "local", "process", "workers" or an own `fedld.Engine`.
        out: folder of the study; None: a temporary one, which is removed with the study.
        resume: finish the study that is in `out`.
        jobs: runs at a time; default: one per core; 0: one after another in this process.
        executor: a Dask client that runs the study on its cluster; `out` is then visible to all its machines.
        progress: whether to show progress bars.
        settings: further settings of all experiments.

    Returns:
        The finished study: its table, verdict and runs.

    Raises:
        FedLDError: a name, option or setting is wrong.

    >>> import fedld
    >>> data = fedld.data("digits", clients=3)
    >>> study = fedld.compare(["fedavg", "fedprox"], data, seeds=[0, 1], rounds=1, jobs=0)
    >>> sorted(study.results)
    [('fedavg', 0), ('fedavg', 1), ('fedprox', 0), ('fedprox', 1)]
    """
    if jobs is not None and (not isinstance(jobs, int) or jobs < 0):
        raise FedLDError(f"jobs is a number of runs at a time, not {jobs!r:.80}")
    if engine == SIMULATION:
        raise FedLDError(f"engine '{SIMULATION}' runs one experiment at a time: use fedld.run")
    where = as_engine(engine)
    client = check_client(executor) if executor is not None else None
    if client is not None and engine != "local":
        raise FedLDError("executor runs the study on a cluster with the engine 'local': give no engine")
    parts = {"model": model, "objective": objective, "rule": rule, "metrics": metrics, "folds": folds}
    named_settings = _settings(federation, parts, settings)
    study = plan(
        named_settings,
        methods,
        seeds if seeds is not None else (0,) if folds else (0, 1, 2),
        command="fedld.compare(...) in Python",
        primary=primary,
        target=str(target),
        values=_own_data(federation, settings),
    )
    check_own_tables(settings, [*(methods.values() if isinstance(methods, Mapping) else methods)])
    with _folder(out) as (path, owned):
        with _watched(study.rounds, f"{len(study.cells)} runs", progress) as watch:
            comparison = run_study(
                study, path, resume=resume, jobs=jobs, progress=watch, engine=where, client=client
            )
        results = {
            _key(cell): Result(cell.path, cell.label, cell.experiment, owned) for cell in study.placed(path)
        }
    return Study(path, comparison, results, owned)


def _key(cell: Cell) -> tuple[str, int] | tuple[str, int, int]:
    """Give the key of a study's run: method and seed, in a cross-validation also fold."""
    experiment = cell.experiment
    if experiment.fold is None:
        return cell.label, experiment.seed
    return cell.label, experiment.seed, experiment.fold


def auto(
    federation: Data = "fundus-sim",
    *,
    minutes: float = 10,
    model: str | nn.Module | Callable[..., nn.Module] = "cnn",
    metrics: Metrics = (),
    primary: str | None = None,
    out: str | Path,
    resume: bool = False,
    jobs: int | None = None,
    **settings: Any,
) -> AutoResult:
    """Find the method to use within some minutes, and train it.

    Methods and learning rates are judged on held-out training images; the test set is read at the end.

    Args:
        federation: data, as in `fedld.run`.
        minutes: time for the search and the final training together.
        model: network, as in `fedld.run`.
        metrics: further measures, as in `fedld.run`.
        primary: measure that decides; default: the task's first.
        out: folder of all trials and of the final run.
        resume: continue the search that is in `out`.
        jobs: runs at a time; default: one per core.
        settings: further settings of all experiments.

    Returns:
        What was chosen, why, and what was tried; `path` is the folder of the final run.

    Raises:
        FedLDError: a setting is wrong, or the time is too short for one trial of each method.

    >>> import fedld
    >>> fedld.auto("digits", minutes=0, out="search")
    Traceback (most recent call last):
        ...
    fedld.errors.FedLDError: minutes is the time to spend, above 0, not 0
    """
    named_settings = _settings(federation, {"model": model, "metrics": metrics}, settings)
    return search(named_settings, user_path(out), minutes=minutes, primary=primary, jobs=jobs, resume=resume)


def tune(
    method: Named | Method | type[Method] = "fedavg",
    federation: Data = "fundus-sim",
    *,
    out: str | Path,
    minutes: float = 10,
    trials: int | None = None,
    seeds: Sequence[int] = (0,),
    primary: str | None = None,
    grid: Mapping[str, Sequence[Value]] | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    resume: bool = False,
    **settings: Any,
) -> Tuned:
    """Search a method's numbers on images held out from the clients' training data.

    Args:
        method: name or table of a method.
        federation: data, as in `fedld.run`.
        out: folder of the trials, tune.json and tuned.toml.
        minutes: time to spend; the trial under way is finished.
        trials: stop after so many trials.
        seeds: seeds of every trial.
        primary: measure that decides; default: the task's first.
        grid: values of settings; all their combinations are tried.
        ranges: lowest and highest value of settings to search, instead of a grid. With neither, the
            learning rate and the method's own numbers are searched.
        resume: continue a search that is in `out`.
        settings: further settings of an experiment.

    Returns:
        The trials and the best of them; `experiment` is the recommended one.

    Raises:
        FedLDError: a setting is wrong, `out` holds a search, or no trial finished.

    >>> import fedld, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     data = fedld.data("digits", clients=3)
    ...     tuned = fedld.tune("fedavg", data, out=folder + "/tune", grid={"lr": [0.05]}, rounds=1, workers=0)
    >>> tuned.experiment.lr
    0.05
    """
    if grid is not None and ranges is not None:
        raise FedLDError("grid and ranges exclude each other: give one of them")
    return search_settings(
        _settings(federation, {"method": method}, settings),
        user_path(out),
        minutes=minutes,
        trials=trials,
        seeds=seeds,
        primary=primary,
        grid={name: tuple(values) for name, values in grid.items()} if grid else None,
        ranges={name: SearchRange(*ends) for name, ends in ranges.items()} if ranges else None,
        resume=resume,
        command="fedld.tune(...) in Python",
    )


def diagnose(subject: Result | Study | Federation | str | Path) -> Diagnosis:
    """Say where heterogeneity hurts: in the records of a run, or in a federation before training.

    Args:
        subject: a result, the path of a run directory, or a federation.

    Returns:
        Findings with their numbers; `verdict` is one sentence, `to_markdown()` the whole text.

    Raises:
        FedLDError: the path holds no run.

    >>> import fedld
    >>> diagnose(fedld.data("digits", clients=3, partition="dirichlet", alpha=0.1)).findings[0].check
    'label_skew'
    """
    if isinstance(subject, Federation):
        return diagnose_federation(subject)
    return diagnose_run(_path_of(subject))


def report(
    subjects: Result | Study | str | Path | Sequence[Result | Study | str | Path],
    out: str | Path = "report.html",
    *,
    primary: str | None = None,
    figures: str | Path | None = None,
) -> Path:
    """Write one page about runs and studies: verdict, charts and tables.

    Args:
        subjects: results, studies, or paths of run and study directories; one of them or a list.
        out: page to write.
        primary: measure that decides; default: the study's own, else the task's first.
        figures: folder that also gets every figure as SVG, PDF and PNG, and its data as CSV.

    Returns:
        The path of the page.

    Raises:
        FedLDError: a path holds no records, or a file cannot be written.

    >>> import fedld, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = fedld.run("fedavg", fedld.data("digits", clients=3), rounds=1, workers=0)
    ...     fedld.report(result, folder + "/report.html").name
    'report.html'
    """
    listed = [subjects] if isinstance(subjects, Result | Study | str | Path) else subjects
    paths = [_path_of(subject) for subject in listed]
    page = user_path(out)
    write_report(paths, page, primary)
    if figures is not None:
        write_figures(paths, user_path(figures), primary)
    return page


def predict(
    model: Result | Study | str | Path,
    samples: str | Path | NDArray[Any],
    *,
    method: str | None = None,
    masks: str | Path | None = None,
) -> Any:
    """Predict for new pictures, or rows of a table, with a trained model.

    Args:
        model: a result, a study (its seeds as one predictor), or the path of a run, study or model file.
        samples: file or folder of pictures, npz file, CSV or parquet table, or an array: uint8 pictures
            (N, H, W, C), or rows (N, features) as the model was trained on.
        method: label of the method, for a study with several.
        masks: new folder for the masks of a segmentation, as PNG files.

    Returns:
        A data frame with one row per sample: its name, what is predicted, and probabilities. It is a pandas
        frame if pandas is installed, else a polars frame (extra `analysis`).

    Raises:
        FedLDError: there is no such model, or the samples cannot be read or do not fit it.

    >>> import fedld
    >>> data = fedld.data("digits", clients=3)
    >>> result = fedld.run("fedavg", data, rounds=1, workers=0)
    >>> list(fedld.predict(result, data.images[:2]).columns)[:3]
    ['name', 'predicted', 'p_0']
    """
    predictor = load_predictor(_path_of(model), method)
    values = samples if isinstance(samples, np.ndarray) else user_path(samples)
    predictions = predict_samples(predictor, values, masks=None if masks is None else user_path(masks))
    for note in predictions.notes:
        warnings.warn(note, stacklevel=2)
    columns = {name: _numbers(cells) for name, cells in predictions.columns.items() if name != "name"}
    columns = {"name": predictions.columns["name"], **columns}
    return data_frame(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def _numbers(cells: Sequence[str]) -> Sequence[str | float]:
    """Turn a column into numbers if every cell is one."""
    try:
        return [float(cell) for cell in cells]
    except ValueError:
        return cells


def _path_of(subject: Result | Study | str | Path) -> Path:
    """Give the directory of the records of a run or a study."""
    return subject.path if isinstance(subject, Result | Study) else user_path(subject)


def _settings(federation: Data, parts: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Collect all settings of a call, in the words of an experiment."""
    for key in settings:
        if key in parts or key == "dataset":
            raise FedLDError(f"'{key}' is given twice")
    named_parts = {key: value for key, value in parts.items() if value is not None}
    return {**named_parts, **_data_settings(federation), **settings}


def _own_data(federation: Data, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Use a federation as it is, although settings could make it again.

    Settings of the call that change the data ask for another federation, which is then loaded.
    """
    if not isinstance(federation, Federation) or federation.spec is None:
        return {}
    return {} if _data_settings(federation).keys() & settings.keys() else {"dataset": federation}


def _data_settings(federation: Data) -> dict[str, Any]:
    """Give settings from which the data can be made again, or else the value itself."""
    if isinstance(federation, str):
        return {"dataset": federation}
    if isinstance(federation, Mapping):
        return dict(federation)
    spec = federation if isinstance(federation, DataSpec) else getattr(federation, "spec", None)
    if spec is None:
        data_settings: dict[str, Any] = {"dataset": federation}
        if isinstance(federation, Federation):
            data_settings |= {"clients": len(federation.clients), "partition": "site"}
        return data_settings
    spec_fields = {key: value for key, value in vars(spec).items() if value is not None}
    seed = spec_fields.pop("seed")
    shared = {key: value for key, value in spec_fields.items() if key in SETTINGS}
    return {**shared, "data_seed": seed, "data": {k: v for k, v in spec_fields.items() if k not in SETTINGS}}


@contextmanager
def _folder(out: str | Path | None) -> Iterator[tuple[Path, TemporaryDirectory[str] | None]]:
    """Give the run's folder: the user's, or a temporary one that is removed with the result."""
    if out is not None:
        if not isinstance(out, str | Path):
            raise FedLDError(f"out is the path of a folder, not {out!r:.80}")
        yield user_path(out), None
        return
    owned = TemporaryDirectory(prefix="fedld-", ignore_cleanup_errors=True)
    yield Path(owned.name) / "run", owned


@contextmanager
def _watched(total: int, label: str, progress: bool | None) -> Iterator[Progress]:
    """Show a progress bar on a terminal or in a notebook."""
    if progress if progress is not None else (console.is_terminal or console.is_jupyter):
        with RunBars(total, label) as bars:
            yield bars
    else:
        yield loop.quiet
