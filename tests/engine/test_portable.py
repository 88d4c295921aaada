"""Models for programs without fedld give the same probabilities."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedld.cli import app
from fedld.config.experiment import make_experiment
from fedld.engine import portable
from fedld.engine.loop import run
from fedld.engine.network import load_model
from fedld.errors import FedLDError

TINY = {"dataset": "digits", "clients": 2, "rounds": 1, "workers": 0}


@pytest.fixture(scope="module", params=[{}, {"model": "resnet8", "method": "fedrod"}], ids=str)
def trained(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("portable") / "run"
    run(make_experiment(TINY | request.param), out)
    return out


def told(file, pixels):
    """What another program makes of the file."""
    if file.suffix == ".pt":
        extra = {"fedld.json": ""}
        model = torch.jit.load(file, _extra_files=extra)
        with torch.no_grad():
            return model(torch.from_numpy(pixels)).numpy(), json.loads(extra["fedld.json"])
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(file)
    (found,) = session.run(["probabilities"], {"pixels": pixels})
    return found, json.loads(session.get_modelmeta().custom_metadata_map["fedld"])


@pytest.mark.parametrize("format", ["onnx", "torchscript"])
def test_an_exported_model_gives_the_same_probabilities(trained, tmp_path, format):
    if format == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    result = CliRunner().invoke(app, ["export", str(trained), "--model", format, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.iterdir()
    saved = load_model(trained)
    channels, height, width = saved.facts.input_shape
    images = np.random.default_rng(3).integers(0, 256, (5, height, width, channels), np.uint8)
    probabilities, facts = told(file, images.transpose(0, 3, 1, 2).astype(np.float32))
    np.testing.assert_allclose(probabilities, saved.probabilities(images), atol=1e-5)
    assert facts["classes"] == list(saved.facts.classes)


def test_a_model_that_gives_something_else_is_not_written(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(portable, "TOLERANCE", -1.0)
    with pytest.raises(FedLDError, match=r"probabilities differ by .*: nothing is written"):
        portable.export_model(load_model(trained), tmp_path / "model.pt", "torchscript")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format_is_one_sentence(trained, tmp_path):
    result = CliRunner().invoke(app, ["export", str(trained), "--model", "onx", "--out", str(tmp_path)])
    assert "unknown model format 'onx': did you mean 'onnx'?" in str(result.exception)
    result = CliRunner().invoke(app, ["export", str(tmp_path), "--model", "onnx"])
    assert isinstance(result.exception, FedLDError)
