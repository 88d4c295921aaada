import math

import pytest
import torch
from typer.testing import CliRunner

import fedld
from fedld import FedLDError
from fedld.cli import app
from fedld.config.experiment import make_experiment
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


def test_a_vertical_flip_is_exact(images):
    flipped = Augmentation(vertical=1.0)(images, generator())
    torch.testing.assert_close(flipped, images.flip(-2), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["natural", "xray", "fundus"])
def test_named_sets_change_pictures_and_their_strength_says_how_much(images, name):
    augment = AUGMENTATIONS[name]
    result = augment(images, generator())
    assert result.shape == images.shape
    assert result.isfinite().all()
    assert torch.equal(result, augment(images, generator()))
    ramp = images[:, :, 6:18, 6:18].mean((2, 3))  # the middle: a rotation keeps what is there
    weak, strong = (augment.strengthened(s)(images, generator()) for s in (0.1, 1.0))
    change = [(one[:, :, 6:18, 6:18].mean((2, 3)) - ramp).abs().mean() for one in (weak, strong)]
    assert change[0] < change[1]
    assert augment.strengthened(1.0) is augment


def test_an_xray_is_never_mirrored():
    assert (AUGMENTATIONS["xray"].flip, AUGMENTATIONS["xray"].vertical) == (0, 0)


@pytest.mark.parametrize(
    ("setting", "measure", "low", "high"),
    [
        ({"brightness": 0.5}, lambda x: x.mean((1, 2, 3)), -0.5, 0.5),
        ({"contrast": 0.4}, lambda x: x.std((1, 2, 3)), 0.6, 1.4),
        ({"saturation": 0.4}, lambda x: x.std(1).mean((1, 2)) / 0.886, 0.6, 1.4),
        ({"noise": 0.3}, lambda x: x.std((1, 2, 3)), 1.0, 1.1),
        ({"erase": 1.0}, lambda x: (x == 0).float().mean((1, 2, 3)), 0.01, 0.25),
    ],
)
def test_colours_change_within_their_ranges(setting, measure, low, high):
    pictures = torch.randn(400, 3, 16, 16, generator=generator(3))
    pictures = (pictures - pictures.mean((1, 2, 3), keepdim=True)) / pictures.std((1, 2, 3), keepdim=True)
    values = measure(Augmentation(**setting)(pictures, generator()))
    assert low - 0.1 < values.min() < values.max() < high + 0.1
    assert values.std() > 0 or setting == {"noise": 0.3}


def test_features_have_no_pictures_to_augment():
    with pytest.raises(FedLDError, match=r"augment needs pictures .* not samples of shape \(7,\)"):
        AUGMENTATIONS["natural"](torch.zeros(4, 7), generator())


def darker(images):
    return images - 10 * torch.rand(len(images), 1, 1, 1)


def shifted(images, generator):
    return images + torch.rand(1, generator=generator)


class Noise(torch.nn.Module):
    def forward(self, images):
        return images + 0.1 * torch.randn_like(images)


SETTINGS = {"clients": 2, "rounds": 1, "workers": 0, "client_losses": False}


@pytest.mark.parametrize("own", [darker, shifted, Noise(), Augmentation(degrees=20)])
def test_own_functions_and_modules_change_the_training_and_repeat(own):
    plain = fedld.run("fedavg", "digits", **SETTINGS)
    one, other = (fedld.run("fedavg", "digits", augment=own, **SETTINGS) for _ in range(2))
    vectors = [torch.cat([p.flatten() for p in r.model.parameters()]) for r in (plain, one, other)]
    assert torch.equal(vectors[1], vectors[2])
    assert not torch.equal(vectors[0], vectors[1])


def test_an_own_function_comes_by_import_path_where_it_is_typed(tmp_path, monkeypatch):
    (tmp_path / "my_augment.py").write_text("def dim(images):\n    return images * 0.5\n")
    monkeypatch.chdir(tmp_path)
    words = [
        "run",
        "--dataset",
        "digits",
        "--rounds",
        "1",
        "--clients",
        "2",
        "--out",
        "run",
        "--workers",
        "0",
    ]
    answer = CliRunner().invoke(app, [*words, "--augment", "my_augment:dim"])
    assert answer.exit_code == 0, answer.output
    assert 'augment = "my_augment:dim"' in (tmp_path / "run/config.toml").read_text()
    with pytest.raises(FedLDError, match="augment 'my_augment:dim' is not part of fedld"):
        make_experiment({"augment": "my_augment:dim"})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"augment": lambda images: images[:1]}, r"gave shape \(1, .* for a batch of shape"),
        ({"augment": lambda images: 1 / 0}, "failed: ZeroDivisionError"),
        ({"augment": Noise}, "not <class"),
        ({"augment": darker, "augment_strength": 2}, "augment_strength is for named sets"),
        ({"augment": "natual"}, "unknown augment 'natual': did you mean 'natural'"),
    ],
)
def test_what_cannot_augment_is_one_sentence(settings, reason):
    with pytest.raises(FedLDError, match=reason):
        fedld.run("fedavg", "digits", **SETTINGS, on_client_failure="stop", **settings)
