"""`digits`: scikit-learn's 1,797 handwritten digits, 8 x 8 grey, ten classes."""

from pathlib import Path

import numpy as np

from fedld.data.pixels import Progress, resize
from fedld.data.spec import DataSpec
from fedld.data.table import Table, cached, fingerprint, write_table


def open_table(spec: DataSpec, root: Path, progress: Progress | None = None) -> Table:
    """Copy the digits that scikit-learn ships into the cache."""

    def build(folder: Path) -> None:
        from sklearn.datasets import load_digits

        data = load_digits()
        images = np.rint(data.images * (255 / 16)).astype(np.uint8)[..., None]  # sixteen grey levels
        if spec.image_size is not None:
            images = resize(images, spec.image_size)
        split = np.full(len(images), "draw")
        write_table(folder, images, data.target.astype(np.int64), tuple("0123456789"), split=split)

    return cached(root, "digits", fingerprint("digits", spec.image_size), build)
