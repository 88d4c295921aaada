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
Scenes are painted in vectorised NumPy, layer by layer, a block of eyes at a time.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from fedld.data.masks import Masks
from fedld.data.pixels import Pixels, Progress
from fedld.data.spec import DataSpec
from fedld.data.table import Table, cached, fingerprint, write_table
from fedld.errors import FedLDError
from fedld.seeds import derive, numpy_generator

Floats = NDArray[np.float32]
BLUR_SIZE = 48  # pixels for which blur is given
EARLY = 0.1  # share of the diseased without a visible sign: accuracy cannot pass 95 %
MARKED = 0.5  # of a spot's middle, above which a pixel belongs to the lesion
EDGE, STEEP = 0.93, 60  # the round aperture
ORANGE, PALE, LIPID, TAG = (0.72, 0.36, 0.16), (0.95, 0.72, 0.42), (0.98, 0.86, 0.45), (0.15, 0.8, 0.35)
ARCADES = (  # bend, turn and width of each vessel
    (0.75, 0.0, 0.034),
    (1.1, 0.12, 0.026),
    (-0.5, 0.1, 0.026),
    (2.2, -0.1, 0.018),
    (-1.6, -0.2, 0.018),
)


@dataclass(frozen=True, kw_only=True)
class Camera:
    """How one site photographs."""

    gain: tuple[float, float, float]  # colour cast
    gamma: float
    vignette: float
    blur: float
    noise: float


class Eyes:
    """Anatomy of `count` eyes; every layer takes and gives scenes (count, size, size, 3) in 0-1."""

    def __init__(self, rng: np.random.Generator, count: int, size: int) -> None:
        self.rng, self.count, self.size = rng, count, size
        self.axis = np.linspace(-1, 1, size, dtype=np.float32)
        self.side = rng.choice(np.array([-1, 1], np.float32), size=count)  # left or right eye
        self.x = self.axis[None, None, :] - self._normal(0.03)
        self.y = self.axis[None, :, None] - self._normal(0.03)
        self.radius2 = self.x**2 + self.y**2
        disc_x, disc_y = 0.46 * self.side[:, None, None] + self._normal(0.05), self._normal(0.05)
        self.disc_x, self.disc_y = self.x - disc_x, self.y - disc_y  # as seen from the optic disc
        self.marks = np.zeros((count, size, size), np.uint8)  # 1 haemorrhage, 2 exudate, after `lesions`

    def retina(self) -> Floats:
        """Paint the orange background with choroidal texture, optic disc and macula."""
        tint = np.exp(0.06 * self.rng.standard_normal((self.count, 1, 1, 3), np.float32))
        texture = 1 + 0.07 * self._texture(7) - 0.12 * self.radius2
        macula = (self.x + 0.12 * self.side[:, None, None]) ** 2 + (self.y - self._normal(0.04)) ** 2
        scene: Floats = _colour(ORANGE) * tint * (texture * (1 - 0.35 * np.exp(-macula / 0.04)))[..., None]
        far = (self.disc_x / 0.15) ** 2 + (self.disc_y / 0.18) ** 2
        scene += 0.85 * np.exp(-(far**2))[..., None] * (_colour(PALE) - scene)
        scene += 0.1 * np.exp(-3 * far)[..., None]
        return scene

    def vessels(self, scene: Floats) -> Floats:
        """Paint arcades from the optic disc: parabolas by first-order distance, thinner further out."""
        dark = np.zeros_like(self.radius2)
        x, y = -self.disc_x * self.side[:, None, None], self.disc_y  # x grows towards the macula
        thin = np.exp(-0.5 * np.sqrt(x**2 + y**2))
        for bend, turn, width in ARCADES:
            angle = turn + self._normal(0.12)
            bent = bend * (1 + self._normal(0.2))
            u, v = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
            wave = 0.03 * np.sin(7 * v + self._normal(6))
            away = (u - bent * v**2 - wave) / np.sqrt(1 + (2 * bent * v) ** 2)
            np.maximum(dark, np.exp(-((away / (width * thin)) ** 2)), out=dark)
        return scene * (1 - dark[..., None] * _colour((0.38, 0.6, 0.5)))

    def lesions(self, scene: Floats, diseased: NDArray[np.bool_]) -> Floats:
        """Paint haemorrhages and exudates of the diseased, and now and then a speck in a healthy eye.

        Some diseases are at an early stage without a visible sign, so no model can be right about all.
        """
        severity = np.rint(10 * self.rng.random((2, self.count)) ** 0.5)
        specks = self.rng.random((2, self.count)) < 0.3
        visible = diseased & (self.rng.random(self.count) >= EARLY)
        number = np.where(visible, severity, specks).astype(np.int64)
        blood = self._spots(number[0], 0.07, 0.13)
        lipid = self._spots(number[1], 0.055, 0.1)
        self.marks = np.where(lipid > MARKED, 2, blood > MARKED).astype(np.uint8)
        scene = scene * (1 - 0.75 * blood[..., None] * _colour((0.6, 1.0, 1.0)))
        return scene + 0.8 * lipid[..., None] * (_colour(LIPID) - scene)

    def expose(self, scene: Floats, camera: Camera) -> Floats:
        """Photograph the scene with the site's camera, inside the round aperture."""
        aperture = 1 / (1 + np.exp(STEEP * (np.sqrt(self.radius2) - EDGE)))
        light = aperture * (1 - camera.vignette * self.radius2)
        scene = np.maximum(scene * light[..., None] * _colour(camera.gain), 0) ** np.float32(camera.gamma)
        blur = self._blur(camera.blur * self.size / BLUR_SIZE)
        scene = np.einsum("ij,kl,njlc->nikc", blur, blur, scene, optimize=True)
        noise = self.rng.standard_normal(scene.shape, np.float32)
        return scene + np.float32(camera.noise) * noise

    def tag(self, scene: Floats, tagged: NDArray[np.bool_]) -> Floats:
        """Paint a bright tag in the corner of some."""
        edge, length = max(1, self.size // 24), max(2, self.size // 9)
        scene = scene.copy()
        scene[tagged, edge : edge + length, edge : edge + length] = TAG
        return scene

    def _spots(self, number: NDArray[np.int64], small: float, large: float) -> Floats:
        """number[n] round spots in eye n; a Gaussian is separable, so all spots are one matrix product."""
        shape = (self.count, int(number.max(initial=0)), 1)
        uniform = self.rng.random((3, *shape), np.float32)
        angle, away, width = (
            2 * math.pi * uniform[0],
            0.8 * np.sqrt(uniform[1]),
            small + (large - small) * uniform[2],
        )
        present = np.arange(shape[1]) < number[:, None]
        rows = np.exp(-(((self.axis - away * np.sin(angle)) / width) ** 2)) * present[..., None]
        columns = np.exp(-(((self.axis - away * np.cos(angle)) / width) ** 2))
        spots: Floats = np.minimum(rows.transpose(0, 2, 1) @ columns, 1)
        return spots

    def _texture(self, knots: int) -> Floats:
        """Draw a smooth random field with `knots` x `knots` bumps."""
        grid = np.linspace(-1, 1, knots, dtype=np.float32)
        basis = np.exp(-(((self.axis[:, None] - grid) * (knots / 2.5)) ** 2))
        values = self.rng.standard_normal((self.count, knots, knots), np.float32)
        field: Floats = basis @ values @ basis.T
        return field

    def _blur(self, sigma: float) -> Floats:
        steps = np.arange(self.size, dtype=np.float32)
        kernel: Floats = np.exp(-0.5 * ((steps[:, None] - steps) / max(sigma, 0.1)) ** 2)
        kernel /= kernel.sum(axis=1, keepdims=True)
        return kernel

    def _normal(self, scale: float) -> Floats:
        """Draw one normal number per eye, shaped to broadcast over its pixels."""
        return np.float32(scale) * self.rng.standard_normal((self.count, 1, 1), np.float32)


def _colour(values: tuple[float, float, float]) -> Floats:
    return np.array(values, np.float32)


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
            "fundus-sim makes a site for each client of a drawn partition; iid gives equal sites"
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
                    images[rows] = photograph(labels[rows], lens, tag, size, seed=seed, masks=marks)
                    masks[rows] = marks
        names = np.array([f"site_{client + 1}" for client in range(spec.clients)])
        columns = {"site": names[site]}
        if not marked:
            write_table(folder, images, labels, CLASSES, split=split, columns=columns, fixed=True)
            return
        columns["group"] = labels.astype(np.str_)
        fields = {"task": spec.task, "groups": CLASSES, "fixed": True}
        write_table(folder, images, masks, LESIONS, split=split, columns=columns, **fields)

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
    """Photograph eyes with these labels; `tag` in [-1, 1] is the signed strength of the shortcut.

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
    """Draw the tags: shares (1 - strength) / 2 of the healthy and (1 + strength) / 2 of the diseased.

    >>> tags(np.array([0, 0, 0, 0, 1, 1, 1, 1]), 0.5, np.random.default_rng(0)).reshape(2, 4).sum(axis=1)
    array([1, 3])
    """
    tagged = np.zeros(len(labels), bool)
    for label, share in ((0, (1 - strength) / 2), (1, (1 + strength) / 2)):
        members = rng.permutation(np.flatnonzero(labels == label))
        tagged[members[: round(share * len(members))]] = True
    return tagged
