"""A federation from a user's own arrays or datasets, written once to the cache so that every process maps it.

Pictures of uint8 are normalised like those of any dataset; floats are given to the model as they are.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedld.data.federation import Federation, Pair
from fedld.data.masks import mask_targets, to_masks
from fedld.data.npz import MOST_CLASSES
from fedld.data.table import Table, cached, fingerprint, write_table
from fedld.data.targets import check_task, make_targets, target_columns
from fedld.errors import FedLDError
from fedld.paths import cache_root

SAMPLES = ("image", "img", "pixel_values", "features", "x")
LABELS = ("label", "labels", "target", "y")
"""What samples and labels are called in items that are mappings, unless the user says."""


def federation_from_arrays(
    clients: Mapping[str, Pair],
    test: Pair | None,
    classes: Sequence[str] | None,
    name: str,
    task: str = "classification",
) -> Federation:
    """Make a federation from (samples, labels) by client; without a test set a fifth of all is drawn."""
    from fedld.data.datasets import federate
    from fedld.data.spec import DataSpec

    _check_names(clients)
    check_task(task)
    width = 3 if task == "segmentation" else target_columns(task)
    parts = {client: _checked(f"client '{client}'", pair, width) for client, pair in clients.items()}
    if test is not None:
        parts[""] = _checked("the test set", test, width)
    if task == "segmentation":
        parts = {client: _masked(client, x, y) for client, (x, y) in parts.items()}
    _check_alike(parts)
    samples = np.concatenate([x for x, _ in parts.values()])
    words = {y.dtype.kind in "US" for _, y in parts.values()}
    if len(words) > 1:
        raise FedLDError("some clients' labels are words and others' are numbers")
    labels = np.concatenate([y for _, y in parts.values()])
    sites = np.repeat(list(parts), [len(y) for _, y in parts.values()])
    split = np.where(sites == "", "test", "train" if test is not None else "draw")
    columns, table_fields = {"site": sites}, {}
    if task == "classification":
        labels, names = _classes(labels, classes)
    else:
        named = _class_names(classes) or None
        segmented = task == "segmentation"
        made = (
            mask_targets(labels, named, name) if segmented else make_targets(task, labels, name, labels=named)
        )
        labels, names = made.values, made.outputs
        columns["group"] = made.groups.astype(np.str_)
        table_fields = {"task": task, "groups": made.names}
    table = _write(name, samples, labels, names, split=split, columns=columns, fields=table_fields)
    return federate(table, DataSpec(dataset=name, partition="site", task=task))


def _check_names(clients: Any) -> None:
    """Check that clients come by name, and that there is one."""
    if not isinstance(clients, Mapping):
        raise FedLDError(
            f"clients are given by name, {{name: (samples, labels)}}, not as {type(clients).__name__}"
        )
    if not clients:
        raise FedLDError("a federation needs at least one client")
    for client in clients:
        if not isinstance(client, str) or not client:
            raise FedLDError(f"a client's name is a word, not {client!r}")


def federation_from_datasets(
    clients: Mapping[str, Any],
    test: Any | None,
    classes: Sequence[str] | None,
    name: str,
    columns: tuple[str, str] | None = None,
) -> Federation:
    """Make a federation from a dataset or an iterable of samples with labels by client, read once."""
    _check_names(clients)
    if classes is None:
        classes = next(filter(None, (_told_classes(dataset, columns) for dataset in clients.values())), None)
    read = {
        client: _read(f"the dataset of '{client}'", dataset, columns) for client, dataset in clients.items()
    }
    return federation_from_arrays(
        read, None if test is None else _read("the test dataset", test, columns), classes, name
    )


def _read(what: str, dataset: Any, columns: tuple[str, str] | None) -> Pair:
    """Read all items once: by their places where the dataset has a length, else in order."""
    samples, labels = [], []
    for place, item in enumerate(_items(what, dataset)):
        sample, label = _pair(what, place, item, columns)
        samples.append(np.asarray(sample))
        labels.append(np.asarray(label))
        if samples[-1].shape != samples[0].shape:
            raise FedLDError(
                f"item {place} of {what} has shape {samples[-1].shape}, the first one {samples[0].shape}"
            )
    return (np.stack(samples), np.stack(labels)) if samples else (np.empty((0, 1)), np.empty(0, int))


def _items(what: str, dataset: Any) -> Iterable[Any]:
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, Mapping):
        return (dataset[place] for place in range(len(dataset)))
    if isinstance(dataset, Iterable) and not isinstance(dataset, str | bytes | Mapping):
        return dataset
    raise FedLDError(f"{what} is no dataset: it has neither a length and items, nor can it be iterated over")


def _pair(what: str, place: int, item: Any, columns: tuple[str, str] | None) -> tuple[Any, Any]:
    """Take the sample and label of an item: a pair, or a mapping as Hugging Face's datasets give."""
    if isinstance(item, Mapping):
        sample, label = columns or (_first(item, SAMPLES), _first(item, LABELS))
        if sample not in item or label not in item:
            has = ", ".join(map(str, item))
            raise FedLDError(f"item {place} of {what} has {has}: say columns=(sample, label)")
        return item[sample], item[label]
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise FedLDError(f"item {place} of {what} is not a (sample, label) pair")
    return item[0], item[1]


def _first(item: Mapping[Any, Any], names: Sequence[str]) -> str:
    return next((name for name in names if name in item), "")


def _told_classes(dataset: Any, columns: tuple[str, str] | None) -> Sequence[str] | None:
    """Read the class names of a Hugging Face dataset (`features["label"].names`)."""
    features = getattr(dataset, "features", None)
    if not isinstance(features, Mapping):
        return None
    names = getattr(features.get(columns[1] if columns else _first(features, LABELS)), "names", None)
    return names if isinstance(names, list | tuple) else None


def _checked(what: str, pair: Any, width: int = 1) -> tuple[NDArray[Any], NDArray[Any]]:
    """Check one client's arrays: uint8 pictures (N, H, W, C), or floats of any shape, maps (N, H, W, C)."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise FedLDError(f"{what} is not a (samples, labels) pair")
    x, y = np.asarray(pair[0]), np.asarray(pair[1])
    if x.ndim == 0:
        raise FedLDError(f"{what} has {pair[0]!r:.80} for samples")
    if y.ndim != width or len(x) != len(y):
        raise FedLDError(f"{what} has {len(x)} samples and labels of shape {y.shape}")
    if not len(y):
        raise FedLDError(f"{what} has no samples")
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        return x.reshape(*x.shape[:3], -1), y
    if x.dtype.kind not in "fiub" or x.ndim < 2:
        raise FedLDError(f"{what} has samples of {x.dtype} {x.shape}: numbers (N, ...) are needed")
    x = x.astype(np.float32)
    if not np.isfinite(x).all():
        raise FedLDError(f"{what} has samples that are not finite")
    return np.moveaxis(x, 1, -1) if x.ndim == 4 else x, y


def _masked(client: str, x: NDArray[Any], y: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Check masks against their samples."""
    what = f"client '{client}'" if client else "the test set"
    if x.ndim != 4:
        raise FedLDError(f"{what} has samples of shape {x.shape}: segmentation needs pictures")
    return x, to_masks(y, x.shape[:3], what)


def _check_alike(parts: dict[str, tuple[NDArray[Any], NDArray[Any]]]) -> None:
    first, (x, _) = next(iter(parts.items()))
    for client, (other, _) in parts.items():
        if (other.shape[1:], other.dtype) != (x.shape[1:], x.dtype):
            raise FedLDError(
                f"the samples of '{client or 'the test set'}' are {other.dtype} {other.shape[1:]}, "
                f"those of '{first}' {x.dtype} {x.shape[1:]}"
            )


def _classes(
    labels: NDArray[Any], classes: Sequence[str] | None
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Convert labels to numbers from 0, and name the classes."""
    given_names = _class_names(classes)
    if labels.dtype.kind in "US":
        names = given_names or tuple(sorted(map(str, set(labels))))
        unknown = sorted(set(map(str, labels)) - set(names))
        if unknown:
            raise FedLDError(f"label '{unknown[0]}' is not one of the classes {', '.join(names)}")
        return np.array([names.index(str(label)) for label in labels], np.int64), names
    if labels.dtype.kind not in "iub" or labels.min() < 0:
        least = f" from {labels.min()}" if labels.dtype.kind in "iuf" else ""
        raise FedLDError(f"labels are whole numbers from 0 or words, not {labels.dtype}{least}")
    count = max(int(labels.max()) + 1, 2)
    if count > MOST_CLASSES:
        raise FedLDError(f"there is a label {count - 1}: labels count from 0, {MOST_CLASSES} are the most")
    names = given_names or tuple(map(str, range(count)))
    if len(names) < count:
        raise FedLDError(f"there is a label {count - 1}, but only {len(names)} classes are named")
    return labels.astype(np.int64), names


def _class_names(classes: Sequence[str] | None) -> tuple[str, ...]:
    """Check the given class names, each once; empty without any."""
    if classes is None:
        return ()
    if isinstance(classes, str) or not isinstance(classes, Iterable):
        raise FedLDError(f"classes is a list of names, not {classes!r:.80}")
    names = tuple(classes)
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise FedLDError(f"classes are different names, not {list(names)!r:.80}")
    return names


def _write(
    name: str,
    samples: NDArray[Any],
    labels: NDArray[Any],
    classes: tuple[str, ...],
    split: NDArray[np.str_],
    columns: Mapping[str, NDArray[np.str_]],
    fields: Mapping[str, Any],
) -> Table:
    """Write the table of this content once; equal content finds it by its digest."""
    digest = sha256()
    for array in (samples, labels, split, columns["site"]):
        digest.update(np.ascontiguousarray(array).tobytes())
    key = fingerprint(
        "arrays", digest.hexdigest(), str(samples.dtype), samples.shape, classes, *fields.values()
    )
    channels = samples.shape[-1] if samples.ndim == 4 else 1
    constants: dict[str, Any] = {}
    if samples.dtype != np.uint8:  # as they are: no mean is taken off
        constants = {"mean": (0.0,) * channels, "std": (1.0,) * channels}
    return cached(
        cache_root(),
        "arrays",
        key,
        lambda folder: write_table(
            folder,
            samples,
            labels,
            classes,
            split=split,
            columns=columns,
            partition="site",
            **constants,
            **fields,
        ),
    )
