"""The draw of held-out images: the promised share, every class and every patient in their turn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedld.data.splits import held_out


def draw(labels, fraction, seed, patients=None):
    return held_out(np.asarray(labels), fraction, np.random.default_rng(seed), patients)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=200), st.floats(0, 0.5), st.integers(0, 99))
def test_the_share_is_exact_and_every_class_gives_its_part(labels, fraction, seed):
    labels = np.array(labels)
    taken = draw(labels, fraction, seed)
    assert taken.sum() == np.floor(fraction * len(labels) + 1e-9)
    for label in np.unique(labels):
        assert abs(taken[labels == label].sum() - fraction * (labels == label).sum()) < 2


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.floats(0, 0.5), st.integers(0, 99))
def test_whole_patients_within_the_share(sizes, fraction, seed):
    patients = np.array([f"p{k}" for k, size in enumerate(sizes) for _ in range(size)])
    labels = np.random.default_rng(seed).integers(0, 3, len(patients))
    taken = draw(labels, fraction, seed, patients)
    assert taken.sum() <= fraction * len(labels) + 1e-6
    for patient in np.unique(patients):
        assert len(set(taken[patients == patient].tolist())) == 1


@pytest.mark.parametrize(
    ("labels", "fraction"),
    [(np.arange(20).repeat(3), 0.2), (np.arange(20).repeat(2), 0.2), (np.array([0] * 640 + [1] * 8), 0.05)],
)
def test_every_image_has_the_promised_chance(labels, fraction):
    """Also images of a class with less than half an image to give, which rounding by class never drew."""
    shares = np.mean([draw(labels, fraction, seed) for seed in range(2000)], axis=0)
    for label in np.unique(labels):
        assert shares[labels == label].mean() == pytest.approx(fraction, rel=0.2)


def test_patients_with_many_images_are_drawn_too():
    """One patient with a quarter of what may be taken, beside a hundred with one image."""
    patients = np.array(["large"] * 7 + [f"p{k}" for k in range(133)])
    often = np.mean([draw(np.arange(140) % 2, 0.2, seed, patients)[0] for seed in range(1000)])
    assert 0.1 < often < 0.3
