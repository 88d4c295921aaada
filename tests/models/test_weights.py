from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedld.errors import FedLDError
from fedld.models import build, load_weights

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
    del state["conv1.weight"]
    state["extra"] = torch.zeros(1)
    torch.save(state, tmp_path / "w.pth")
    target = model()
    head = target.fc.weight.clone()
    report = load_weights(target, tmp_path / "w.pth")
    assert report.missing == ("conv1.weight",)
    assert report.unexpected == ("extra",)
    assert report.mismatched == ("fc.weight", "fc.bias")
    assert torch.equal(target.fc.weight, head)
    assert torch.equal(target.layer1[0].conv1.weight, state["layer1.0.conv1.weight"])
    assert "1 missing (conv1.weight)" in str(report)


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
        ("nested.pth", "mapping"),
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
