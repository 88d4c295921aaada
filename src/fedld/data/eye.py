"""Fundus-like photographs in vectorised NumPy: a block of eyes is painted layer by layer."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
SIZE = 48  # pixels for which blur is given
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


@dataclass(frozen=True)
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
        """Orange background with choroidal texture, optic disc and macula."""
        tint = np.exp(0.06 * self.rng.standard_normal((self.count, 1, 1, 3), np.float32))
        texture = 1 + 0.07 * self._texture(7) - 0.12 * self.radius2
        macula = (self.x + 0.12 * self.side[:, None, None]) ** 2 + (self.y - self._normal(0.04)) ** 2
        scene: Floats = _colour(ORANGE) * tint * (texture * (1 - 0.35 * np.exp(-macula / 0.04)))[..., None]
        far = (self.disc_x / 0.15) ** 2 + (self.disc_y / 0.18) ** 2
        scene += 0.85 * np.exp(-(far**2))[..., None] * (_colour(PALE) - scene)
        scene += 0.1 * np.exp(-3 * far)[..., None]
        return scene

    def vessels(self, scene: Floats) -> Floats:
        """Arcades leave the optic disc: parabolas, by their first-order distance, thinner further out."""
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
        """Haemorrhages and exudates, few to many, of the diseased; now and then a speck in a healthy eye.

        Some diseases are at an early stage that nobody can see, so no model can be right about all of them.
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
        """What the site's camera makes of it, inside the round aperture."""
        aperture = 1 / (1 + np.exp(STEEP * (np.sqrt(self.radius2) - EDGE)))
        light = aperture * (1 - camera.vignette * self.radius2)
        scene = np.maximum(scene * light[..., None] * _colour(camera.gain), 0) ** np.float32(camera.gamma)
        blur = self._blur(camera.blur * self.size / SIZE)
        scene = np.einsum("ij,kl,njlc->nikc", blur, blur, scene, optimize=True)
        noise = self.rng.standard_normal(scene.shape, np.float32)
        return scene + np.float32(camera.noise) * noise

    def tag(self, scene: Floats, tagged: NDArray[np.bool_]) -> Floats:
        """A bright tag in the corner of some."""
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
        """Smooth random field with `knots` x `knots` bumps."""
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
        """One normal number an eye, shaped to broadcast over its pixels."""
        return np.float32(scale) * self.rng.standard_normal((self.count, 1, 1), np.float32)


def _colour(values: tuple[float, float, float]) -> Floats:
    return np.array(values, np.float32)
