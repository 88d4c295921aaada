import math

import pytest
import torch

from fedld.data import AUGMENTATIONS, Augmentation


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def images():
    return torch.rand(64, 3, 24, 24, generator=generator(7))


def test_the_generator_decides(images):
    augment = AUGMENTATIONS["retina"]
    assert torch.equal(augment(images, generator(1)), augment(images, generator(1)))
    assert not torch.equal(augment(images, generator(1)), augment(images, generator(2)))


def test_one_picture_does_not_depend_on_the_others(images):
    """Same draws, other neighbours: the picture comes out the same."""
    augment = AUGMENTATIONS["covid-fl"]
    shuffled = images.clone()
    shuffled[1:] = images[1:].flip(0)
    torch.testing.assert_close(augment(images, generator())[0], augment(shuffled, generator())[0])


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_size_type_and_layout_stay(images, layout):
    for shape in ((64, 3, 24, 24), (4, 1, 16, 40)):
        batch = torch.rand(shape).to(memory_format=layout)
        result = AUGMENTATIONS["retina"](batch, generator())
        assert result.shape == batch.shape
        assert result.is_contiguous(memory_format=layout)
    half = AUGMENTATIONS["retina"](images.double(), generator())
    assert half.dtype == torch.float64


def test_flip_is_exact(images):
    flipped = Augmentation(flip=1.0)(images, generator())
    torch.testing.assert_close(flipped, images.flip(-1), atol=1e-4, rtol=0)
    some = Augmentation(flip=0.5)(images, generator())
    changed = (some - images).abs().amax(dim=(1, 2, 3)) > 0.01
    assert 15 < int(changed.sum()) < 49


def test_rotation_goes_round_the_centre():
    x, y = torch.meshgrid(torch.linspace(-1, 1, 49), torch.linspace(-0.5, 0.5, 25), indexing="xy")
    spot = torch.exp(-((x - 0.3) ** 2 + y**2) / 0.005)[None, None].repeat(200, 1, 1, 1)
    turned = Augmentation(degrees=30)(spot, generator())[:, 0]
    total = turned.sum(dim=(1, 2))
    cx, cy = (turned * x).sum(dim=(1, 2)) / total, (turned * y).sum(dim=(1, 2)) / total
    # A picture twice as wide as high: distances stay only if the rotation knows the aspect.
    torch.testing.assert_close(torch.hypot(cx, cy), torch.full((200,), 0.3), atol=0.01, rtol=0)
    angles = torch.rad2deg(torch.atan2(cy, cx))
    assert angles.abs().max() <= 30.5
    assert angles.min() < -25
    assert angles.max() > 25


@pytest.mark.parametrize(("name", "low", "high"), [("retina", 0.6, 1.0), ("covid-fl", 0.8, 1.0)])
def test_crops_lie_inside_and_have_the_papers_area(name, low, high):
    """Areas above 1 do not fit and are drawn again, as in the published transform."""
    width, height, x, y = AUGMENTATIONS[name]._crop(4000, generator(), 1.0)
    assert ((x.abs() + width) <= 1 + 1e-6).all()
    assert ((y.abs() + height) <= 1 + 1e-6).all()
    area, ratio = width * height, width / height
    assert low - 1e-6 <= area.min() < low + 0.01
    assert high - 0.01 < area.max() <= high + 1e-6
    assert 3 / 4 - 1e-6 <= ratio.min() < 0.82
    assert 1.22 < ratio.max() <= 4 / 3 + 1e-6
    assert math.isclose(ratio.log().mean(), 0, abs_tol=0.02)


def test_a_crop_magnifies():
    ramp = torch.linspace(0, 1, 32).expand(100, 1, 32, 32)
    result = Augmentation(scale=(0.25, 0.25))(ramp, generator())
    spans = result[:, 0, 0, -1] - result[:, 0, 0, 0]
    torch.testing.assert_close(spans, torch.full((100,), 0.5), atol=0.02, rtol=0)


def test_beyond_the_picture_is_zero():
    result = Augmentation(degrees=45)(torch.ones(50, 1, 20, 20), generator())
    result = result.round(decimals=4)
    assert set(result.unique().tolist()) == {0.0, 1.0}
    assert (result[:, 0, 8:12, 8:12] == 1).all()


def test_a_crop_that_never_fits_is_the_whole_picture(images):
    torch.testing.assert_close(Augmentation(scale=(2.0, 3.0))(images, generator()), images, atol=1e-4, rtol=0)
