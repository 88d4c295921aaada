from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedld.errors import FedLDError
from fedld.models import build, load_weights
from fedld.models.build import outline

IMAGENET = Path("/work/shared/weights/mobilenet_v2_imagenet_features.safetensors")


class Thing:
    """Something that weights_only refuses."""


def model(classes=2, seed=0):
    return build("resnet8", classes=classes, image_size=32, seed=seed)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_round_trip(tmp_path, suffix):
    path, source, target = tmp_path / f"w{suffix}", model(seed=1), model(seed=2)
    (save_file if suffix == ".safetensors" else torch.save)(source.state_dict(), path)
    report = load_weights(target, path)
    assert set(report.loaded) == set(source.state_dict())
    assert report.missing + report.unexpected + report.mismatched == ()
    for name, value in source.state_dict().items():
        assert torch.equal(value, target.state_dict()[name]), name


def test_report_of_what_did_not_match(tmp_path):
    state = model(classes=5, seed=1).state_dict()
    del state["bn1.num_batches_tracked"]
    state["extra"] = torch.zeros(1)
    torch.save(state, tmp_path / "w.pth")
    target = model()
    head = target.fc.weight.clone()
    report = load_weights(target, tmp_path / "w.pth")
    assert report.missing == ("bn1.num_batches_tracked",)
    assert report.unexpected == ("extra",)
    assert report.mismatched == ("fc.weight", "fc.bias")
    assert torch.equal(target.fc.weight, head)
    assert torch.equal(target.layer1[0].conv1.weight, state["layer1.0.conv1.weight"])
    assert "1 missing (bn1.num_batches_tracked)" in str(report)


def test_loading_writes_into_the_storage_there_is(tmp_path):
    """Parameters may be views of one flat vector: they must stay so."""
    torch.save(model(seed=1).state_dict(), tmp_path / "w.pth")
    target = model(seed=2)
    pointers = [p.data_ptr() for p in target.parameters()]
    load_weights(target, tmp_path / "w.pth")
    assert [p.data_ptr() for p in target.parameters()] == pointers


def bad_files(folder):
    torch.save({"a": Thing()}, folder / "object.pth")
    torch.save([1, 2], folder / "list.pth")
    torch.save({"state_dict": {}}, folder / "nested.pth")
    torch.save({"other": torch.zeros(2)}, folder / "stranger.pth")
    torch.save({"fc.bias": torch.tensor([0.0, float("nan")])}, folder / "nan.pth")
    (folder / "corrupt.pth").write_bytes(b"not an archive")
    (folder / "corrupt.safetensors").write_bytes(b"\x08\x00\x00\x00")
    (folder / "weights.bin").write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("object.pth", "pickled objects"),
        ("list.pth", "mapping"),
        ("nested.pth", "fits"),
        ("stranger.pth", "fits"),
        ("nan.pth", "fc.bias"),
        ("corrupt.pth", "cannot be read"),
        ("corrupt.safetensors", "cannot be read"),
        ("weights.bin", "must end in"),
        ("absent.pth", "does not exist"),
    ],
)
def test_bad_files(tmp_path, name, word):
    bad_files(tmp_path)
    target = model()
    before = {key: value.clone() for key, value in target.state_dict().items()}
    with pytest.raises(FedLDError, match=word) as caught:
        load_weights(target, tmp_path / name)
    assert name in str(caught.value)
    assert all(torch.equal(before[key], value) for key, value in target.state_dict().items())


@pytest.mark.skipif(not IMAGENET.exists(), reason="shared weights are not here")
def test_imagenet_mobilenet():
    target = build("mobilenet_v2", classes=2, image_size=96, seed=0)
    report = load_weights(target, IMAGENET)
    assert report.missing == ("classifier.1.weight", "classifier.1.bias")
    assert report.unexpected + report.mismatched == ()
    assert len(report.loaded) == 312


def zeros(name, classes):
    state = outline(name, classes, 64).state_dict()
    return {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in state.items()}


def timm_mobilenet():
    """Tensors as timm's mobilenetv2_100 names them, written down from its block definitions."""
    state = {}

    def conv_norm(conv, norm, outputs, inputs, size):
        state[f"{conv}.weight"] = torch.randn(outputs, inputs, size, size)
        for leaf in ("weight", "bias", "running_mean", "running_var"):
            state[f"{norm}.{leaf}"] = torch.rand(outputs)
        state[f"{norm}.num_batches_tracked"] = torch.tensor(7)

    conv_norm("conv_stem", "bn1", 32, 3, 3)
    inputs = 32
    stages = [(1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1)]
    for stage, (expansion, outputs, blocks) in enumerate(stages):
        for index in range(blocks):
            at, wide = f"blocks.{stage}.{index}", inputs * expansion
            if expansion == 1:
                conv_norm(f"{at}.conv_dw", f"{at}.bn1", wide, 1, 3)
                conv_norm(f"{at}.conv_pw", f"{at}.bn2", outputs, wide, 1)
            else:
                conv_norm(f"{at}.conv_pw", f"{at}.bn1", wide, inputs, 1)
                conv_norm(f"{at}.conv_dw", f"{at}.bn2", wide, 1, 3)
                conv_norm(f"{at}.conv_pwl", f"{at}.bn3", outputs, wide, 1)
            inputs = outputs
    conv_norm("conv_head", "bn2", 1280, 320, 1)
    state["classifier.weight"], state["classifier.bias"] = torch.randn(1000, 1280), torch.randn(1000)
    return state


def test_timm_names_of_mobilenet(tmp_path):
    state = timm_mobilenet()
    save_file(state, tmp_path / "w.safetensors")
    target = build("mobilenet_v2", classes=3, image_size=32, seed=0)
    report = load_weights(target, tmp_path / "w.safetensors")
    assert set(report.mismatched) == {"classifier.1.weight", "classifier.1.bias"}
    assert report.missing + report.unexpected == ()
    assert torch.equal(target.features[2].conv[1][0].weight, state["blocks.1.0.conv_dw.weight"])
    assert torch.equal(target.features[17].conv[3].bias, state["blocks.6.0.bn3.bias"])


@pytest.mark.parametrize("wrap", [lambda s: {"state_dict": s, "epoch": 3}, lambda s: {"model": s}])
def test_checkpoints_of_training_scripts(tmp_path, wrap):
    state = {f"module.{key}": value for key, value in model(seed=1).state_dict().items()}
    torch.save(wrap(state), tmp_path / "w.pth")
    assert load_weights(model(), tmp_path / "w.pth").missing == ()


def test_another_width_is_named(tmp_path):
    state = model(seed=1).state_dict()
    state["layer2.0.conv1.weight"] = torch.zeros(48, 16, 3, 3)
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(FedLDError, match=r"'layer2.0.conv1.weight' is 48 x 16 x 3 x 3 there and 32 x"):
        load_weights(model(), tmp_path / "w.pth")


def test_a_trunk_that_is_not_whole_is_refused(tmp_path):
    state = {key: value for key, value in model(seed=1).state_dict().items() if "layer3" not in key}
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(FedLDError, match=r"lacks \d+ tensors .*'layer3.0.conv1.weight'"):
        load_weights(model(), tmp_path / "w.pth")


def test_weights_for_colours_serve_grey_images(tmp_path):
    colours = model(seed=1).eval()
    torch.save(colours.state_dict(), tmp_path / "w.pth")
    grey = build("resnet8", classes=2, image_size=32, channels=1, seed=0).eval()
    load_weights(grey, tmp_path / "w.pth")
    x = torch.randn(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(grey(x), colours(x.expand(2, 3, 32, 32)))


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v2", "resnet8"])
@pytest.mark.parametrize("classes", [2, 1000])
def test_a_file_tells_its_network(tmp_path, name, classes):
    from fedld.cli.weights import check_file

    torch.save(zeros(name, classes=classes), tmp_path / "w.pth")
    found = check_file(tmp_path / "w.pth")
    assert found["model"] == name
    assert found["missing"] + found["mismatched"] + found["unexpected"] == []


def test_the_command_lists_and_checks(tmp_path, capsys):
    from fedld.cli.weights import weights

    weights()
    assert "mobilenetv2_100" in capsys.readouterr().out
    torch.save(model(seed=1).state_dict(), tmp_path / "w.pth")
    weights(tmp_path / "w.pth")
    assert "fits resnet8: 56 tensors loaded" in capsys.readouterr().out
    with pytest.raises(FedLDError, match="of another network"):
        weights(tmp_path / "w.pth", model="resnet18")
    torch.save({"other": torch.zeros(2)}, tmp_path / "w.pth")
    with pytest.raises(FedLDError, match="fits none of"):
        weights(tmp_path / "w.pth")
