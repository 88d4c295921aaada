"""Several saved models as one predictor: the seeds of a method in a study, their probabilities averaged."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedld.data.masks import mask_name, mask_png, new_mask_folder
from fedld.data.prediction import read_pictures, read_rows
from fedld.engine.network import Facts, SavedModel, load_model
from fedld.errors import FedLDError, nearest
from fedld.records.reader import Run, by_label, read_one
from fedld.records.writer import write_atomically
from fedld.tasks.regression import Regression
from fedld.tasks.segmentation import Segmentation


@dataclass(frozen=True, eq=False)
class Ensemble:
    """Models with the same classes and inputs.

    notes: what a user must know: a file without a checksum, a seed without a model.
    """

    models: tuple[SavedModel, ...]
    notes: tuple[str, ...] = ()

    @property
    def facts(self) -> Facts:
        """Classes and inputs, which all models share."""
        return self.models[0].facts

    def probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Compute the mean of the models' probabilities, (N, classes), of uint8 pictures (N, H, W, C)."""
        by_model = np.stack([model.probabilities(images) for model in self.models])
        return np.asarray(by_model.mean(axis=0), np.float64)

    def columns(self, samples: NDArray[Any]) -> dict[str, list[str]]:
        """Predict for samples as columns of a table, of pictures (N, H, W, C) or rows (N, features)."""
        return self.described(self.outputs(samples))

    def outputs(self, samples: NDArray[Any]) -> Tensor:
        """Average what the models give for pictures (N, H, W, C) or rows (N, features).

        Classes and pixels have the logarithm of the mean of the models' probabilities; labels, values and
        risks have the mean of their outputs.
        """
        task = self.models[0].task
        if task.dense or task.name == "classification":
            mean = np.stack([model.probabilities(samples) for model in self.models]).mean(axis=0)
            return torch.from_numpy(mean).log()
        return torch.stack([self._outputs(model, samples) for model in self.models]).mean(0)

    def described(self, outputs: Tensor) -> dict[str, list[str]]:
        """Compute the outputs as columns of a table."""
        return self.models[0].task.predicted(outputs, self.facts.classes)

    @property
    def segments(self) -> bool:
        """Whether the models give a mask for a picture."""
        return self.models[0].task.dense

    def masks(self, outputs: Tensor) -> NDArray[np.int64] | None:
        """Give masks (N, H, W) of class numbers; -1 where there is no finite output. None for other tasks."""
        task = self.models[0].task
        return task.masks(outputs) if isinstance(task, Segmentation) else None

    def _outputs(self, model: SavedModel, samples: NDArray[Any]) -> Tensor:
        """Compute the outputs of a model in the scale of the first one, where targets were standardised."""
        if not isinstance(model.task, Regression):
            return model.outputs(samples)
        (mean, deviation), (own_mean, own_deviation) = self.facts.scale, model.facts.scale
        return (model.outputs(samples) * own_deviation + own_mean - mean) / deviation


@dataclass(frozen=True, kw_only=True)
class PredictedSamples:
    """PredictedSamples for some samples.

    columns: cells of a table by column, one row per sample
    notes: what a user must know of the model and of single samples
    masks: number of mask files that were written
    """

    columns: dict[str, list[str]]
    notes: tuple[str, ...]
    masks: int


def predict(
    predictor: Ensemble, samples: Path | NDArray[Any], *, bits: int | None = None, masks: Path | None = None
) -> PredictedSamples:
    """Predict for pictures, or for rows of a table.

    Args:
        predictor: one or several saved models.
        samples: file or folder of pictures, npz file, table, or an array of samples.
        bits: bits that 16-bit picture files really use.
        masks: new folder for the masks of a segmentation, as PNG files.

    Returns:
        The columns of a table of predictions.

    Raises:
        FedLDError: samples cannot be read or do not fit the model, or the model gives no masks.
    """
    if masks is not None and not predictor.segments:
        raise FedLDError(f"--masks is for segmentation, and this model is of {predictor.facts.task}")
    folder = None if masks is None else new_mask_folder(masks)
    columns: dict[str, list[str]] = {"name": []}
    notes, written = list(predictor.notes), set[str]()
    for names, values in _parts(predictor, samples, bits):
        outputs = predictor.outputs(values)
        columns["name"] += names
        for name, cells in predictor.described(outputs).items():
            columns.setdefault(name, []).extend(cells)
        pictures = predictor.masks(outputs) if folder is not None else None
        if folder is not None and pictures is not None:
            notes += _write_masks(folder, names, pictures, written)
    return PredictedSamples(columns=columns, notes=tuple(notes), masks=len(written))


def _parts(
    predictor: Ensemble, samples: Path | NDArray[Any], bits: int | None
) -> Iterable[tuple[list[str], NDArray[Any]]]:
    """Read the samples part by part, with the name of each."""
    facts = predictor.facts
    if isinstance(samples, np.ndarray):
        return [([str(row) for row in range(len(samples))], samples)]
    if facts.columns:
        return [read_rows(samples, facts.columns)]
    channels, height, width = facts.input_shape
    return read_pictures(samples, (channels, height, width), bits)


def _write_masks(
    folder: Path, names: Sequence[str], masks: NDArray[np.int64], written: set[str]
) -> list[str]:
    """Write the masks of some pictures; return a note on each picture without a finite output."""
    notes = []
    for name, mask in zip(names, masks, strict=True):
        if mask.min() < 0:
            notes.append(f"the model gives no finite number for {name}: no mask")
            continue
        file = mask_name(name, written)
        written.add(file)
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / file, mask_png(mask))
    return notes


def load_predictor(path: Path, method: str | None = None) -> Ensemble:
    """Read what predicts: a model file, the model of a run, or the models of a method's seeds in a study.

    Args:
        path: model file, run directory or study directory.
        method: label of the method, for a study with several.

    Returns:
        An ensemble, of one model where there is one.

    Raises:
        FedLDError: there is no such model or method, a file is damaged, or models do not fit together.
    """
    if not (path / "study.json").exists():
        if method is not None:
            raise FedLDError(f"'{path}' is no study: --method chooses among a study's methods")
        return joined({str(path): load_model(path)})
    return seeds_of(_chosen(path, by_label(read_one(path).runs), method))


def seeds_of(runs: Sequence[Run]) -> Ensemble:
    """Give the models of some runs together; runs without a model are noted."""
    have = [run for run in runs if (run.path / "model.safetensors").is_file()]
    if not have:
        raise FedLDError(f"no run of {runs[0].label} has a global model")
    notes = tuple(f"{run.repetition} of {run.label} has no model" for run in runs if run not in have)
    return joined({run.repetition: load_model(run.path) for run in have}, notes)


def joined(models: dict[str, SavedModel], notes: tuple[str, ...] = ()) -> Ensemble:
    """Give models by name as one predictor; they must have the same classes and inputs."""
    first, *others = models
    for name in others:
        for fact in ("classes", "input_shape", "task", "columns"):
            if getattr(models[name].facts, fact) != getattr(models[first].facts, fact):
                raise FedLDError(f"the models of {first} and {name} have other {fact.replace('_', ' ')}")
    file_notes = tuple(model.note for model in models.values() if model.note)
    return Ensemble(tuple(models.values()), (*file_notes, *notes))


def _chosen(path: Path, labelled: dict[str, list[Run]], method: str | None) -> list[Run]:
    if not labelled:
        raise FedLDError(f"the study '{path}' has no runs")
    if method is None and len(labelled) > 1:
        raise FedLDError(f"'{path}' is a study of {', '.join(labelled)}: choose one with --method")
    if method is not None and method not in labelled:
        raise FedLDError(f"there is no method '{method}' in '{path}': {nearest(method, list(labelled))}")
    return labelled[method or next(iter(labelled))]
