import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from fedld.data import DataSpec, load


def tagged(images):
    """The tag is the only thing in the corner that is not background."""
    return images[:, 3, 3, 1] > 128


@pytest.fixture
def simulate(tmp_path):
    def make(**options):
        return load(DataSpec(**{"samples": 800, "clients": 4, "partition": "iid", **options}), tmp_path)

    return make


def test_same_seed_same_pictures(tmp_path):
    one, again, other = (
        load(DataSpec(samples=200, clients=2, seed=seed), tmp_path / place)
        for seed, place in ((0, "a"), (0, "b"), (1, "c"))
    )
    assert (one.images == again.images).all()
    assert (one.images != other.images).any()


def test_the_shortcut_holds_inside_a_site_flips_between_sites_and_is_absent_from_the_test_set(simulate):
    federation = simulate(shortcut=0.8)
    tag, labels = tagged(federation.images), np.array(federation.labels)
    agrees = [np.mean(tag[client.train] == labels[client.train]) for client in federation.clients]
    assert agrees == pytest.approx([0.9, 0.1, 0.9, 0.1], abs=0.01)
    assert np.mean(tag[federation.test] == labels[federation.test]) == pytest.approx(0.5, abs=0.01)
    federation = simulate(shortcut=1.0)
    tag = tagged(federation.images)
    assert (tag[federation.clients[0].train] == labels[federation.clients[0].train]).all()


def camera_distance(federation):
    """How far the sites' mean colours lie apart, seen on the test images (same mix of labels everywhere)."""
    colours = [federation.images[client.test].mean(axis=(0, 1, 2)) for client in federation.clients]
    return np.std(colours, axis=0).mean()


def test_feature_shift_dials_the_cameras(simulate):
    distances = [camera_distance(simulate(feature_shift=shift)) for shift in (0.0, 0.5, 1.0)]
    assert distances[0] < 2
    assert distances[0] * 3 < distances[1] < distances[2]


def test_the_partition_dials_the_labels(simulate):
    counts = simulate(partition="classes", classes_per_client=1).label_counts()
    assert (counts.min(axis=1) == 0).all()
    assert [len(client.test) for client in simulate().clients] == [40, 40, 40, 40]


def test_the_label_is_in_the_lesions_and_not_in_the_brightness(simulate):
    """Spots stand out from their surroundings: a filter sees them, the mean colour does not."""
    federation = simulate(feature_shift=0.0)
    green = np.array(federation.images[:, 10:38, 10:38, 1], np.float64)
    labels = np.array(federation.labels)

    def auroc(score):
        return np.mean(score[labels == 1][:, None] > score[labels == 0])

    relief = green - gaussian_filter(green, (0, 2, 2))
    assert 0.8 < auroc(relief.std(axis=(1, 2))) < 0.95  # the early stages stay hidden
    assert 0.35 < auroc(green.mean(axis=(1, 2))) < 0.65


def test_image_size(simulate):
    assert simulate(image_size=32, samples=100).images.shape == (100, 32, 32, 3)
