"""What `fedld.run` and `fedld.compare` give back: a run or a study as one object."""

import base64
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any, Literal

from torch import nn

from fedld.analysis.diagnosis.page import Diagnosis, diagnose_run
from fedld.config.experiment import Experiment
from fedld.config.resolve import make_federation, make_method
from fedld.engine.ensemble import Ensemble, load_predictor
from fedld.engine.network import loaded, normalised
from fedld.errors import FedLDError
from fedld.frames import data_frame
from fedld.models.files import read_model
from fedld.records.reader import Run, read_run
from fedld.records.schema import ClientLine, RoundLine, Summary
from fedld.records.tables import flat_client, flat_round, flat_summary, headline
from fedld.study.comparison import Comparison, Standing
from fedld.study.report import write_report

TERMS = ("local", "shift", "aggregation", "global")


@dataclass(frozen=True, eq=False)
class Result:
    """A finished run; everything but the model is read from the records in `path`.

    Attributes:
        path: the run's folder.
        label: the method's label.
        experiment: the settings.

    >>> import fedld
    >>> result = fedld.run("fedavg", fedld.data("digits", clients=3), rounds=1, workers=0, decompose=1)
    >>> [sorted(terms) for terms in result.decomposition]
    [['aggregation', 'global', 'local', 'round', 'shift']]
    """

    path: Path
    label: str
    experiment: Experiment = field(repr=False)
    _owned: TemporaryDirectory[str] | None = field(default=None, repr=False)  # goes when the result goes

    @cached_property
    def _run(self) -> Run:
        return read_run(self.path, self.label, self.experiment.seed)

    @cached_property
    def model(self) -> nn.Module:
        """The final global model, in eval mode."""
        file = self.path / "model.safetensors"
        if not file.exists():
            raise FedLDError(f"{self.label} has no global model: every client keeps its own")
        method = make_method(self.experiment)
        federation = normalised(self.experiment, method.federation(make_federation(self.experiment)))
        content = read_model(file)
        if content.note:
            warnings.warn(content.note, stacklevel=2)
        return loaded(self.experiment, method, federation, content.tensors)

    @property
    def rounds(self) -> list[RoundLine]:
        """One line per round."""
        return self._run.rounds.lines

    @property
    def clients(self) -> list[ClientLine]:
        """One line per round and client."""
        return self._run.clients.lines

    def frame(self, which: Literal["rounds", "clients"] = "rounds") -> Any:
        """Give the run's records as a data frame of numbers.

        Args:
            which: rounds (one row per round) or clients (one row per round and client).

        Returns:
            A pandas frame if pandas is installed, else a polars frame (extra `analysis`).

        Raises:
            FedLDError: there is no such table, or neither library is installed.
        """
        if which == "rounds":
            return data_frame(flat_round(line) for line in self.rounds)
        if which != "clients":
            raise FedLDError(f"there is no table '{which}': valid names: clients, rounds")
        return data_frame(flat_client(line) for line in self.clients)

    @property
    def decomposition(self) -> list[dict[str, Any]]:
        """The terms of Eq. 2 in the decomposed rounds: local, shift, aggregation, and their sum, global."""
        lines: list[Mapping[str, Any]] = [line for line in self.rounds if "local_loss" in line]
        return [{"round": line["round"], **{t: line.get(f"{t}_loss") for t in TERMS}} for line in lines]

    @property
    def summary(self) -> Summary:
        """What the run came to."""
        summary = self._run.summary
        assert summary is not None
        return summary

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """Where heterogeneity hurt, in sentences."""
        return diagnose_run(self.path)

    def report(self, path: str | Path) -> Path:
        """Write the page about this run.

        Args:
            path: page to write.

        Returns:
            Its path.
        """
        write_report([self.path], Path(path))
        return Path(path)

    def __repr__(self) -> str:
        s = self.summary
        reached = f"{s['rounds']} rounds, {headline(s)}, seed {s['seed']}"
        return f"<fedld.Result {self.label} on {s['dataset']}: {reached}>"

    def _repr_html_(self) -> str:
        from fedld.study.report.chart import looks
        from fedld.study.report.curves import measure_chart

        chart = measure_chart([self._run], next(iter(self._run.measures.values())), looks([self.label]))
        cells = [
            [name.replace("_", " "), f"{value:.4f}" if isinstance(value, float) else str(value)]
            for name, value in flat_summary(self.summary).items()
            if isinstance(value, int | float) and name.startswith(("final", "rounds", "clients", "seconds"))
        ]
        title = f"<p><b>{escape(self.label)}</b> on {escape(self.summary['dataset'])}</p>"
        return title + _table(cells) + (_picture(chart.figure) if chart else "")


@dataclass(frozen=True, eq=False)
class Study:
    """A finished comparison: every run, the table and the verdict.

    Attributes:
        path: the study's folder.
        comparison: statistics over all runs.
        results: every run by (method, seed), in a cross-validation by (method, seed, fold).
    """

    path: Path
    comparison: Comparison = field(repr=False)
    results: Mapping[tuple[str, int] | tuple[str, int, int], Result] = field(repr=False)
    """Every run by (method, seed), in a cross-validation by (method, seed, fold)."""
    _owned: TemporaryDirectory[str] | None = field(default=None, repr=False)

    @property
    def table(self) -> list[list[str]]:
        """Head and rows as text, the primary measure first."""
        return self.comparison.table

    def frame(self) -> Any:
        """Give the table as a data frame of numbers: one row per method.

        Returns:
            A pandas frame if pandas is installed, else a polars frame (extra `analysis`). Columns are the
            method, its number of seeds, mean and standard deviation of every measure, the difference to the
            baseline in the primary measure with its interval, effect size and corrected p, MB and seconds.

        Raises:
            FedLDError: neither library is installed.
        """
        return data_frame(_numbers(standing) for standing in self.comparison.standings)

    def ensemble(self, method: str) -> Ensemble:
        """Put the models of a method's seeds together as one predictor.

        Args:
            method: the method's label.

        Returns:
            A predictor; its `probabilities` are the mean of the models'.

        Raises:
            FedLDError: there is no such method, it has no global model, or the network is the user's own.
        """
        return load_predictor(self.path, method)

    @property
    def verdict(self) -> str:
        """Who leads, by how much and how surely, in one sentence."""
        return self.comparison.verdict

    def report(self, path: str | Path) -> Path:
        """Write the page about this study.

        Args:
            path: page to write.

        Returns:
            Its path.
        """
        write_report([self.path], Path(path))
        return Path(path)

    def __repr__(self) -> str:
        return f"<fedld.Study {self.comparison.title}: {self.verdict}>"

    def _repr_html_(self) -> str:
        from fedld.study.report.chart import looks
        from fedld.study.report.curves import measure_chart

        labels = [standing.label for standing in self.comparison.standings]
        chart = measure_chart(self.comparison.runs, self.comparison.primary_measure, looks(labels))
        notes = "".join(f"<li>{escape(line)}</li>" for line in self.comparison.warnings)
        text = f"<p><b>{escape(self.verdict)}.</b></p><ul>{notes}</ul>"
        return text + _table(self.table, head=True) + (_picture(chart.figure) if chart else "")


def _numbers(standing: Standing) -> dict[str, Any]:
    """Format a method's row of the table."""
    row: dict[str, Any] = {"method": standing.label}
    row["folds" if standing.folds else "seeds"] = len(standing.seeds)
    for name, by_seed in standing.values.items():
        values = list(by_seed.values())
        row |= {name: fmean(values), f"{name}_sd": stdev(values) if len(values) > 1 else None}
    difference = standing.difference
    low, high = (difference.interval if difference else None) or (None, None)
    return row | {
        "difference": difference.mean if difference else None,
        "difference_low": low,
        "difference_high": high,
        "effect_size": difference.effect_size if difference else None,
        "p_value": standing.p_value,
        "megabytes": standing.megabytes,
        "seconds": standing.seconds,
    }


def _table(rows: Sequence[Sequence[str]], head: bool = False) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = [line(row, "th" if head and k == 0 else "td") for k, row in enumerate(rows)]
    return f"<table>{''.join(body)}</table>"


def _picture(figure: Any) -> str:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=96)
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}">'
