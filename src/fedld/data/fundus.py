"""`fundus-sim`: fundus-like photographs made here, in which every kind of heterogeneity has its own dial.

The label (healthy, diseased) is defined by lesions: dark haemorrhages and bright exudates. Healthy eyes
carry a speck now and then and 10 % of the diseased show nothing yet, so that accuracy ends at about 95 %.
Every client is a site: labels are drawn first, divided among the clients by the partition (label skew), and
then photographed.

- `feature_shift`: how far the cameras of the sites differ (colour cast, gamma, vignette, blur, noise);
  0 gives every site the same camera.
- `shortcut`: inside a site a tag in the corner agrees with the label in a share (1 + shortcut) / 2 of the
  images, and from one site to the next it changes sides. In the test set the tag says nothing (share 1/2) and
  the images come from all cameras alike, so a model that learned the tag pays for it.

With the task segmentation the lesions are to be found: masks of haemorrhages and exudates. Diseased eyes have
many and healthy ones hardly any, so the partition of the labels is a skew of the lesions' prevalence.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from fedld.data.eye import Camera, Eyes
from fedld.data.masks import Masks
from fedld.data.pixels import Pixels, Progress
from fedld.data.spec import DataSpec
from fedld.data.table import Table, cached, fingerprint, write_table
from fedld.errors import FedLDError
from fedld.seeds import derive, numpy_generator

Labels = NDArray[np.int64]
VERSION = 6  # raise it when the pictures change
CLASSES = ("healthy", "diseased")
BLOCK = 128  # images rendered at a time: small enough for the processor's cache
SIZE = 32  # pixels: lesions are still seen, and a small CNN is fast
MASK_SIZE = 48  # pixels: the smallest lesion is three pixels wide
LESIONS = ("background", "haemorrhage", "exudate")


def open_table(spec: DataSpec, root: Path, progress: Progress | None = None) -> Table:
    """Draw labels, divide them, photograph every site."""
    partition = "dirichlet" if spec.partition == "auto" else str(spec.partition)
    if partition == "site" or partition.startswith("column:") or spec.split is not None:
        raise FedLDError(
            "fundus-sim makes a site for each client of a drawn partition; iid gives equal sites."
        )
    marked = spec.task == "segmentation"
    size = spec.image_size or (MASK_SIZE if marked else SIZE)
    test = round(spec.samples * spec.test_fraction)
    labels = np.arange(spec.samples, dtype=np.int64) % 2
    parts = spec.divide(labels[test:], partition)
    site = np.arange(spec.samples, dtype=np.int64) // 2 % spec.clients  # test rows: all sites alike
    for client, part in enumerate(parts):
        site[test + part] = client

    def build(folder: Path) -> None:
        images = np.empty((spec.samples, size, size, 3), np.uint8)
        masks = np.zeros((spec.samples, size, size), np.uint8)
        split = np.where(np.arange(spec.samples) < test, "test", "train")
        for client in range(spec.clients):
            lens = camera(spec.seed, client, spec.feature_shift)
            for name, tag in (("train", spec.shortcut * (-1) ** client), ("test", 0.0)):
                rows = np.flatnonzero((split == name) & (site == client))
                seed = derive(spec.seed, "fundus-sim", name, client)
                with threadpool_limits(1):  # small products: more BLAS threads would wait for each other
                    marks = np.empty((len(rows), size, size), np.uint8)
                    images[rows] = photograph(labels[rows], lens, tag, size, seed, marks)
                    masks[rows] = marks
        names = np.array([f"site_{client + 1}" for client in range(spec.clients)])
        columns = {"site": names[site]}
        if not marked:
            write_table(folder, images, labels, CLASSES, split=split, columns=columns, fixed=True)
            return
        columns["group"] = labels.astype(np.str_)
        facts = {"task": spec.task, "groups": CLASSES, "fixed": True}
        write_table(folder, images, masks, LESIONS, split=split, columns=columns, **facts)

    dials: tuple[object, ...] = (
        VERSION,
        spec.seed,
        spec.feature_shift,
        spec.shortcut,
        size,
        test,
        site.tolist(),
    )
    if marked:
        dials += ("masks",)
    return cached(root, "fundus-sim", fingerprint("fundus-sim", *dials), build)


def camera(seed: int, site: int, feature_shift: float) -> Camera:
    """Draw a site's camera; at feature_shift 0 all are the same."""
    rng = numpy_generator(seed, "fundus-sim", "camera", site)
    red, green, blue, gamma, vignette = feature_shift * rng.normal(size=5)
    blur, noise = min(feature_shift, 1) * rng.uniform(-1, 1, size=2)
    return Camera(
        gain=(float(np.exp(0.3 * red)), float(np.exp(0.3 * green)), float(np.exp(0.3 * blue))),
        gamma=float(np.exp(0.3 * gamma)),
        vignette=float(np.clip(0.35 + 0.3 * vignette, 0, 0.9)),
        blur=float(0.5 + 0.35 * blur),
        noise=float(0.02 + 0.015 * noise),
    )


def photograph(
    labels: Labels, lens: Camera, tag: float, size: int, seed: int, masks: Masks | None = None
) -> Pixels:
    """Photographs of eyes with these labels; `tag` in [-1, 1] is the signed strength of the shortcut.

    Where there is room for `masks` (N, size, size), the lesions are written there.
    """
    images = np.empty((len(labels), size, size, 3), np.uint8)
    tagged = tags(labels, tag, numpy_generator(seed, "tags"))
    for start in range(0, len(labels), BLOCK):
        block = labels[start : start + BLOCK]
        eyes = Eyes(numpy_generator(seed, "eyes", start), len(block), size)
        scene = eyes.expose(eyes.lesions(eyes.vessels(eyes.retina()), block == 1), lens)
        scene = eyes.tag(scene, tagged[start : start + BLOCK])
        images[start : start + BLOCK] = np.rint(scene.clip(0, 1) * 255)
        if masks is not None:
            masks[start : start + BLOCK] = eyes.marks
    return images


def tags(labels: Labels, strength: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Who carries the tag: shares (1 - strength) / 2 of the healthy and (1 + strength) / 2 of the diseased.

    >>> tags(np.array([0, 0, 0, 0, 1, 1, 1, 1]), 0.5, np.random.default_rng(0)).reshape(2, 4).sum(axis=1)
    array([1, 3])
    """
    tagged = np.zeros(len(labels), bool)
    for label, share in ((0, (1 - strength) / 2), (1, (1 + strength) / 2)):
        members = rng.permutation(np.flatnonzero(labels == label))
        tagged[members[: round(share * len(members))]] = True
    return tagged
