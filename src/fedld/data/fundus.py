"""`fundus-sim`: fundus-like photographs made here, in which every kind of heterogeneity has its own dial.

The label (healthy, diseased) is defined by lesions: small dark haemorrhages and bright exudates. Healthy eyes may
carry one faint speck, so that "anything spotty" is not enough. Every client is a site, so labels are drawn first,
divided among the clients by the partition (label skew), and then photographed:

- `feature_shift`: how far the sites' cameras differ (colour cast, gamma, vignette, blur, noise); 0, one camera.
- `shortcut`: a tag in the corner agrees with the label with probability (1 + shortcut) / 2 inside a site, and
  the sign of that rule flips from one site to the next. In the test set the tag says nothing (probability 1/2)
  and the images come from all cameras alike, so whoever learned the tag pays for it.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedld.data.pixels import Progress
from fedld.data.spec import DataSpec
from fedld.data.table import Table, cached, fingerprint, write_table
from fedld.errors import FedLDError
from fedld.seeds import derive, numpy_generator

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]
CLASSES = ("healthy", "diseased")
SIZE = 48
BLOCK = 128  # images rendered at a time: small enough for the processor's cache


@dataclass(frozen=True)
class Camera:
    """How one site photographs."""

    gain: Floats  # (3,) colour cast
    gamma: float
    vignette: float
    blur: float  # pixels at 48 x 48
    noise: float


def camera(seed: int, site: int, feature_shift: float) -> Camera:
    """Draw a site's camera; at feature_shift 0 all are the same."""
    rng = numpy_generator(seed, "fundus-sim", "camera", site)
    cast, gamma, vignette, blur, noise = rng.normal(size=3), *rng.normal(size=2), *rng.uniform(-1, 1, size=2)
    return Camera(
        gain=np.exp(0.3 * feature_shift * cast).astype(np.float32),
        gamma=float(np.exp(0.3 * feature_shift * gamma)),
        vignette=float(np.clip(0.35 + 0.3 * feature_shift * vignette, 0, 0.9)),
        blur=float(0.5 + 0.35 * min(feature_shift, 1) * blur),
        noise=float(0.02 + 0.015 * min(feature_shift, 1) * noise),
    )


def open_table(spec: DataSpec, root: Path, progress: Progress | None = None) -> Table:
    """Draw labels, divide them, photograph every site."""
    partition = "dirichlet" if spec.partition == "auto" else spec.partition
    if partition == "site" or partition.startswith("column:") or spec.split is not None:
        raise FedLDError(
            "fundus-sim makes one site for each client of a drawn partition; use iid for equal sites."
        )
    size = spec.image_size or SIZE
    test = round(spec.samples * spec.test_fraction)
    labels = np.arange(spec.samples, dtype=np.int64) % 2
    parts = spec.divide(labels[test:], partition)
    site = np.concatenate([np.arange(test) // 2 % len(parts), np.empty(spec.samples - test, np.int64)])
    for client, part in enumerate(parts):
        site[test + part] = client

    def build(folder: Path) -> None:
        images = np.empty((spec.samples, size, size, 3), np.uint8)
        for client in range(len(parts)):
            lens = camera(spec.seed, client, spec.feature_shift)
            for name, rows in (
                ("test", np.flatnonzero(site[:test] == client)),
                ("train", test + parts[client]),
            ):
                sign = 0.0 if name == "test" else spec.shortcut * (-1) ** client
                key = derive(spec.seed, "fundus-sim", name, client)
                images[rows] = photograph(labels[rows], lens, sign, size, key)
        names = np.array([f"site_{client + 1}" for client in range(len(parts))])
        split = np.where(np.arange(spec.samples) < test, "test", "train")
        write_table(folder, images, labels, CLASSES, split=split, columns={"site": names[site]}, fixed=True)

    dials = (spec.seed, spec.feature_shift, spec.shortcut, size, test, site.tolist())
    return cached(root, "fundus-sim", fingerprint("fundus-sim", *dials), build)


def photograph(labels: Labels, lens: Camera, tag: float, size: int, seed: int) -> NDArray[np.uint8]:
    """Render eyes with these labels: tag in [-1, 1] is the signed strength of the shortcut."""
    blocks = [
        _photograph(labels[start : start + BLOCK], lens, tag, size, numpy_generator(seed, start))
        for start in range(0, len(labels), BLOCK)
    ]
    return np.concatenate([np.empty((0, size, size, 3), np.uint8), *blocks])


def _photograph(
    labels: Labels, lens: Camera, tag: float, size: int, rng: np.random.Generator
) -> NDArray[np.uint8]:
    eye = Eyes(rng, len(labels), size)
    scene = eye.retina()
    scene = eye.vessels(scene)
    scene = eye.lesions(scene, labels == 1)
    scene = eye.expose(scene, lens)
    tagged = rng.random(len(labels)) < 0.5 + tag * (labels - 0.5)
    return eye.tag(scene, tagged)


class Eyes:
    """A block of eyes: anatomy drawn once, painted layer by layer on (N, size, size, 3) in 0-1."""

    def __init__(self, rng: np.random.Generator, count: int, size: int) -> None:
        self.rng, self.count, self.size = rng, count, size
        axis = np.linspace(-1, 1, size, dtype=np.float32)
        self.axis = axis
        self.side = rng.choice([-1.0, 1.0], size=count).astype(np.float32)  # left or right eye
        self.middle = self._normal(0.03, 2)
        self.x = axis[None, None, :] - self.middle[:, 0, None, None]
        self.y = axis[None, :, None] - self.middle[:, 1, None, None]
        self.radius2 = self.x**2 + self.y**2
        self.disc = np.stack([0.46 * self.side, np.zeros(count, np.float32)], 1) + self._normal(0.05, 2)

    def retina(self) -> Floats:
        """Orange background with choroidal texture, optic disc and macula."""
        base = np.array([0.72, 0.36, 0.16], np.float32) * np.exp(self._normal(0.1, 3))
        texture = 1 + 0.07 * self._smooth_noise(7) - 0.12 * self.radius2
        scene = base[:, None, None, :] * texture[..., None]
        macula = self._spot(-0.12 * self.side, self._normal(0.04), 0.2)
        scene *= (1 - 0.35 * macula)[..., None]
        far = ((self.x - self.disc[:, 0, None, None]) / 0.15) ** 2
        far = far + ((self.y - self.disc[:, 1, None, None]) / 0.18) ** 2
        bright = np.exp(-(far**2))[..., None]
        cup = np.exp(-far * 3)[..., None]
        scene += bright * (np.array([0.95, 0.72, 0.42], np.float32) - scene) * 0.85
        return scene + 0.1 * cup

    def vessels(self, scene: Floats) -> Floats:
        """Arcades that leave the optic disc: parabolas, by their first-order distance, thinner further out."""
        dark = np.zeros(self.radius2.shape, np.float32)
        x = (self.disc[:, 0, None, None] - self.x) * self.side[:, None, None]  # towards the macula
        y = self.y - self.disc[:, 1, None, None]
        thin = np.exp(-0.5 * np.sqrt(x**2 + y**2))
        for bend, turn, width in (
            (0.75, 0.0, 0.034),
            (1.1, 0.12, 0.026),
            (-0.5, 0.1, 0.026),
            (2.2, -0.1, 0.018),
            (-1.6, -0.2, 0.018),
        ):
            angle = turn + self._normal(0.12)[:, None, None]
            bent = bend * (1 + self._normal(0.2)[:, None, None])
            u, v = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
            wave = 0.03 * np.sin(7 * v + 6 * self._normal(1.0)[:, None, None])
            away = (u - bent * v**2 - wave) / np.sqrt(1 + (2 * bent * v) ** 2)
            np.maximum(dark, np.exp(-((away / (width * thin)) ** 2)), out=dark)
        return scene * (1 - dark[..., None] * np.array([0.38, 0.6, 0.5], np.float32))

    def lesions(self, scene: Floats, diseased: NDArray[np.bool_]) -> Floats:
        """Haemorrhages and exudates of the diseased; at most one faint speck in a healthy eye."""
        dark = np.where(diseased, self.rng.integers(2, 7, self.count), 0)
        bright = np.where(diseased, self.rng.integers(2, 7, self.count), 0)
        speck = ~diseased & (self.rng.random(self.count) < 0.5)
        blood = self._spots(dark + speck, 0.035, 0.075)
        lipid = self._spots(bright, 0.025, 0.05)
        scene = scene * (1 - 0.75 * blood[..., None] * np.array([0.6, 1.0, 1.0], np.float32))
        return scene + lipid[..., None] * (np.array([0.98, 0.86, 0.45], np.float32) - scene) * 0.8

    def expose(self, scene: Floats, lens: Camera) -> Floats:
        """What the site's camera makes of it, inside the round aperture."""
        aperture = 1 / (1 + np.exp((np.sqrt(self.radius2) - 0.93) * 60))
        light = aperture * (1 - lens.vignette * self.radius2)
        scene = np.maximum(scene * light[..., None] * lens.gain, 0) ** np.float32(lens.gamma)
        kernel = self._blur(lens.blur * self.size / SIZE)
        scene = np.einsum("ij,njkc->nikc", kernel, scene, optimize=True)
        scene = np.einsum("kl,nilc->nikc", kernel, scene, optimize=True)
        return scene + lens.noise * self.rng.standard_normal(scene.shape, np.float32)

    def tag(self, scene: Floats, tagged: NDArray[np.bool_]) -> NDArray[np.uint8]:
        """The shortcut: a bright green tag in the corner."""
        edge, length = max(1, self.size // 24), max(2, self.size // 9)
        scene[tagged, edge : edge + length, edge : edge + length] = (0.15, 0.8, 0.35)
        return np.rint(scene.clip(0, 1) * 255).astype(np.uint8)

    def _spots(self, numbers: Labels, small: float, large: float) -> Floats:
        """`numbers[n]` round spots inside eye n; Gaussians are separable, so each layer is one matrix product."""
        most = int(numbers.max(initial=0))
        angle = self.rng.uniform(0, 2 * np.pi, (self.count, most))
        away = 0.8 * np.sqrt(self.rng.random((self.count, most)))
        width = self.rng.uniform(small, large, (self.count, most, 1)).astype(np.float32)
        width *= (np.arange(most) < numbers[:, None])[..., None] + np.float32(1e-6)
        rows = np.exp(-(((self.axis - (away * np.sin(angle))[..., None]) / width) ** 2))
        columns = np.exp(-(((self.axis - (away * np.cos(angle))[..., None]) / width) ** 2))
        total: Floats = np.einsum("nsh,nsw->nhw", rows, columns, optimize=True).astype(np.float32)
        return np.minimum(total, 1)

    def _spot(self, x: Floats, y: Floats, width: float) -> Floats:
        away = (self.x - x[:, None, None]) ** 2 + (self.y - y[:, None, None]) ** 2
        return np.exp(-away / width**2)

    def _smooth_noise(self, knots: int) -> Floats:
        """Random field with `knots` x `knots` bumps."""
        grid = np.linspace(-1, 1, knots, dtype=np.float32)
        basis = np.exp(-(((self.axis[:, None] - grid) * knots / 2.5) ** 2))
        values = self.rng.standard_normal((self.count, knots, knots), np.float32)
        return np.einsum("ha,nab,wb->nhw", basis, values, basis, optimize=True)

    def _blur(self, sigma: float) -> Floats:
        steps = np.arange(self.size, dtype=np.float32)
        kernel = np.exp(-0.5 * ((steps[:, None] - steps) / max(sigma, 0.1)) ** 2)
        return kernel / kernel.sum(axis=1, keepdims=True)

    def _normal(self, scale: float, *shape: int) -> Floats:
        return np.float32(scale) * self.rng.standard_normal((self.count, *shape), np.float32)
