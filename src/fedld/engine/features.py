"""The outputs of a frozen trunk, computed once for all images of a dataset and kept beside their pixels.

Two files: features-KEY.npy, which every process maps, and features-KEY.json, written last, with the checksum
that vouches for it. The key is made of the trunk's weights, the pixels' normalisation and what computed them;
the folder is that of the dataset. So workers, methods, seeds and runs share them. Damaged ones are made anew.
"""

import fcntl
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedld.data import Federation
from fedld.data.table import file_sha256, fingerprint
from fedld.engine.backends.processes import end_with_parent, one_thread, processes, tune_process, without_main
from fedld.errors import FedLDError
from fedld.local import Samples
from fedld.models import Trunk
from fedld.models.cut import CHUNK
from fedld.paths import cache_size
from fedld.records.writer import dump, write_atomically

FORMAT = 1  # raise it when the files or the way to compute them change
SHARE = 8 * CHUNK  # images of one task
KEPT = 4  # files per dataset at a site

Tell = Callable[[str], None]


def cached_features(
    trunk: Trunk,
    federation: Federation,
    *,
    device: str = "cpu",
    tell: Tell = print,
    quota: float | None = None,
) -> Path | None:
    """Give the file with the features of every image, computed first where it is absent.

    None if it cannot be.

    A `quota` bounds the bytes of the whole cache, on a disk that others may ask to fill: old files go.
    """
    folder = (federation.folder / "images.npy").resolve().parent
    kind = (torch.__version__, torch.backends.cpu.get_cpu_capability(), device)
    key = fingerprint("features", FORMAT, trunk.digest, federation.mean, federation.std, kind)
    file = folder / f"features-{key[:20]}.npy"
    try:
        with _locked(folder / f".features-{key[:20]}.lock"):
            if not _whole(file, tell):
                if quota is not None:
                    _forget(folder)
                _build(file, trunk, federation=federation, device=device, quota=quota)
    except OSError as error:
        tell(
            f"the features of the frozen trunk cannot be kept in {folder} ({error.strerror}): "
            "they are computed for every batch instead"
        )
        return None
    return file


def _forget(folder: Path) -> None:
    """Leave the newest few files of a dataset before a new one, so that they never fill the disk."""
    files = sorted(folder.glob("features-*.npy"), key=lambda file: file.stat().st_mtime)
    for file in files[: max(0, len(files) - KEPT + 1)]:
        file.with_suffix(".json").unlink(missing_ok=True)
        file.unlink(missing_ok=True)


def _whole(file: Path, tell: Tell) -> bool:
    """Say whether the file is there and as it was written."""
    facts_file = file.with_suffix(".json")
    if not facts_file.exists():
        return False
    try:
        facts = json.loads(facts_file.read_text())
        if facts["format"] != FORMAT:
            raise ValueError("it is of another version")
        if facts["sha256"] != file_sha256(file):
            raise ValueError("its checksum is wrong")
    except (FedLDError, OSError, ValueError, KeyError, TypeError) as error:
        tell(f"the cached features {file} are damaged ({error}): they are computed again")
        return False
    return True


def _build(file: Path, trunk: Trunk, federation: Federation, device: str, quota: float | None) -> None:
    """Compute aside, then rename."""
    count = len(federation.images)
    job = _Extraction(trunk, federation, device)
    shape = (count, *job.rows(np.zeros(1, np.int64)).shape[1:])
    needed, room = 4 * np.prod(shape, dtype=float), shutil.disk_usage(file.parent).free
    if needed > room or (quota is not None and needed > quota - cache_size()):
        raise OSError(0, f"{needed / 2**30:.1f} GiB are too many")
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        np.lib.format.open_memmap(aside, mode="w+", dtype=np.float32, shape=shape).flush()
        starts = range(0, count, SHARE)
        workers = min(os.cpu_count() or 1, len(starts) // 2)  # processes take a second to start
        if workers > 1 and device == "cpu" and quota is None and not current_process().daemon:
            _in_processes(job, aside, starts, workers)
        else:
            tune_process()
            for start in starts:
                job.write(aside, start)
        facts = {"format": FORMAT, "sha256": file_sha256(aside), "shape": shape}
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)
    write_atomically(file.with_suffix(".json"), dump(facts).encode())


class _Extraction:
    """Features of rows of a dataset."""

    def __init__(self, trunk: Trunk, federation: Federation, device: str) -> None:
        self.trunk, self.federation, self.device = trunk.to(device), federation, device

    @torch.inference_mode()
    def rows(self, positions: NDArray[np.int64]) -> Tensor:
        """Compute the features as they are stored."""
        f = self.federation
        samples = Samples(
            f.images,
            np.zeros(len(f.images), np.int64),
            positions=positions,
            mean=f.mean,
            std=f.std,
            device=self.device,
        )
        features: Tensor = self.trunk(samples.batch(slice(None))[0])
        return (features.permute(0, 2, 3, 1) if features.ndim == 4 else features).cpu()

    def write(self, file: Path, start: int) -> None:
        """Compute one task's rows and put them into the file."""
        out = np.load(file, mmap_mode="r+", allow_pickle=False)
        stop = min(start + SHARE, len(out))
        out[start:stop] = self.rows(np.arange(start, stop)).numpy()
        out.flush()


_job: list[Any] = []  # the extraction that a worker process is at


def _begin(job: bytes) -> None:
    end_with_parent()
    tune_process()
    _job[:] = [pickle.loads(job)]


def _do(file: Path, start: int) -> None:
    _job[0].write(file, start)


def _in_processes(job: _Extraction, file: Path, starts: range, workers: int) -> None:
    # As bytes: tensors would be handed over one by one, as more file descriptors than a process may send.
    content = pickle.dumps(job)
    with (
        one_thread(),
        without_main(),
        ProcessPoolExecutor(workers, processes(), initializer=_begin, initargs=(content,)) as pool,
    ):
        try:
            list(pool.map(_do, [file] * len(starts), starts))
        except BrokenProcessPool:
            raise FedLDError("a process that computed features died: is there too little memory?") from None


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Lock: one process computes, the others wait for it."""
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
