"""Model files: a checksum that notices a single bit, and bytes that depend on the contents alone."""

import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedld.errors import FedLDError
from fedld.models import load_weights
from fedld.models.files import model_bytes, read_model

TENSORS = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(2, dtype=torch.int64), "c": torch.zeros(0)}
METADATA = {"fedld": "x", "round": "3", "ledger": "é"}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(model_bytes(TENSORS, METADATA))
    return path


def test_other_tools_read_the_file(file):
    state = load_file(file)
    assert all(torch.equal(state[name], TENSORS[name]) for name in TENSORS)
    with safe_open(file, "pt") as content:
        assert {key: content.metadata()[key] for key in METADATA} == METADATA
    assert read_model(file).checked
    assert read_model(file).note is None


def test_the_bytes_depend_on_the_contents_alone(file):
    """safetensors' own writer gives another order of metadata in every process."""
    turned = model_bytes(dict(reversed(TENSORS.items())), dict(reversed(METADATA.items())))
    assert turned == file.read_bytes()
    code = (
        "import sys, torch; from fedld.models.files import model_bytes;"
        "sys.stdout.buffer.write(model_bytes({'w': torch.ones(3)}, {str(k): str(k) for k in range(9)}))"
    )
    made = {subprocess.run([sys.executable, "-c", code], capture_output=True).stdout for _ in range(2)}
    assert made == {model_bytes({"w": torch.ones(3)}, {str(k): str(k) for k in range(9)})}


def test_every_flipped_bit_is_noticed(file, tmp_path):
    content = file.read_bytes()
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        file.write_bytes(damaged)
        try:
            found = read_model(file)
        except FedLDError:
            continue
        # What can remain is a name of a key, so that the file has no checksum, and blanks.
        assert found.note is not None or bytes(damaged).replace(b"\t", b" ").replace(b"\n", b" ") == content


def test_a_file_of_an_older_version_is_read_with_a_note(file):
    save_file(TENSORS, file, METADATA)
    found = read_model(file)
    assert found.metadata == METADATA
    assert "has no checksum" in found.note


def test_a_damaged_file_gives_no_initial_weights(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(FedLDError, match="is damaged: its contents are not those of its checksum"):
        load_weights(torch.nn.Linear(2, 2), file)
