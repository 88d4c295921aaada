"""Damage on disk: a run goes on from what is whole, or refuses and touches nothing."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from fedld.config.experiment import make_experiment
from fedld.engine import loop
from fedld.engine.checkpoint import kept_states
from fedld.engine.loop import resume, run
from fedld.errors import FedLDError
from fedld.local import LocalClient, Reply
from fedld.methods import METHODS, FedAvg
from fedld.records.schema import ROUNDS
from fedld.records.writer import read_lines


@dataclass(frozen=True)
class Keeping(FedAvg):
    """FedAvg whose clients count their rounds in a state; in round `poison` one sends a huge update."""

    poison: int = 0

    def client_update(self, client: LocalClient) -> Reply:
        count = client.state.get("count", torch.zeros(1)) + 1
        client.train(self.loss)
        client.weights.mul_(1 - 0.001 * count)
        if client.round == self.poison and client.name == "client_1":
            client.weights.fill_(1e15)  # its square is a finite float32: not refused
        return client.reply(state={"count": count})


@pytest.fixture(autouse=True)
def keeping(monkeypatch):
    monkeypatch.setitem(METHODS, "keeping", Keeping())


@pytest.fixture(scope="module")
def original(tmp_path_factory, cache):
    """A run of three rounds that was stopped after the second, and the same run undisturbed."""
    folder = tmp_path_factory.mktemp("damage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "keeping", Keeping())
        experiment = make_experiment(
            {"dataset": "digits", "clients": 3, "rounds": 3, "workers": 0, "method": "keeping"}
        )
        run(experiment, folder / "whole")
        advance = loop.RoundLoop._advance

        def stop(self):
            if self.state.round == 2:
                raise KeyboardInterrupt
            advance(self)

        patch.setattr(loop.RoundLoop, "_advance", stop)
        with pytest.raises(loop.Interrupted):
            run(experiment, folder / "run")
    return folder


@pytest.fixture
def stopped(original, tmp_path):
    """A copy of the stopped run to damage."""
    return Path(shutil.copytree(original / "run", tmp_path / "run"))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _snapshot(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def _refuses(path: Path, match: str) -> None:
    """Resume is refused with a sentence and leaves every byte as it was."""
    before = _snapshot(path)
    with pytest.raises(FedLDError, match=match):
        resume(path)
    assert _snapshot(path) == before


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_when_both_checkpoints_are_damaged_resume_refuses_and_touches_nothing(stopped, suffix):
    for path in (stopped / "checkpoints").glob(f"*.{suffix}"):
        _flip(path)
    _refuses(stopped, r"no checkpoint .* is whole .*round 2.*round 1.* restore one from a backup")


def test_records_without_the_checkpoints_they_came_from_are_not_overwritten(stopped):
    shutil.rmtree(stopped / "checkpoints")
    _refuses(stopped, r"no checkpoint .* is whole \(there is none\)")


def test_a_run_stopped_before_its_first_checkpoint_starts_over(original, stopped, contents):
    shutil.rmtree(stopped / "checkpoints")
    (stopped / "rounds.jsonl").unlink()
    resume(stopped)
    assert contents(stopped) == contents(original / "whole")


@pytest.mark.parametrize("damage", [_flip, lambda path: path.write_bytes(b""), Path.unlink])
def test_a_damaged_state_makes_the_run_fall_back_one_checkpoint(original, stopped, contents, damage):
    (state,) = (stopped / "states").glob("client_2.*.round_00002.state")
    damage(state)
    warnings = []
    resume(stopped, warn=warnings.append)
    assert len(warnings) == 1
    assert state.name in warnings[0]
    assert "going on after round 1" in warnings[0]
    assert contents(stopped) == contents(original / "whole")


@pytest.mark.parametrize("how", ["shortened", "changed"])
def test_records_that_are_not_what_the_checkpoint_vouches_for_make_it_fall_back(
    original, stopped, contents, how
):
    path = stopped / "clients.jsonl"
    content = bytearray(path.read_bytes())
    if how == "shortened":
        content = content[:-10]
    else:
        content[-10] ^= 1  # in the last line, which only the newest checkpoint vouches for
    path.write_bytes(content)
    warnings = []
    resume(stopped, warn=warnings.append)
    assert "clients.jsonl was shortened or changed" in warnings[0]
    assert contents(stopped) == contents(original / "whole")


def test_records_shortened_beyond_both_checkpoints_are_refused(stopped):
    (stopped / "clients.jsonl").write_bytes(b"")
    _refuses(stopped, r"no checkpoint .*clients.jsonl was shortened or changed")


def test_a_damaged_summary_is_written_again(original, tmp_path, contents):
    path = shutil.copytree(original / "whole", tmp_path / "run")
    (path / "summary.json").write_text('{"final')
    warnings = []
    resume(path, warn=warnings.append)
    assert "summary.json' is damaged" in warnings[0]
    assert contents(path) == contents(original / "whole")


@pytest.mark.parametrize("damage", [_flip, lambda path: path.write_bytes(b""), Path.unlink])
def test_a_lost_model_of_a_finished_run_is_made_again(original, tmp_path, contents, damage):
    """Resuming told the accuracy and restored nothing."""
    path = Path(shutil.copytree(original / "whole", tmp_path / "run"))
    damage(path / "model.safetensors")
    warnings = []
    resume(path, warn=warnings.append)
    assert "model.safetensors' is" in warnings[0]
    assert "made again from the last checkpoint" in warnings[0]
    assert contents(path) == contents(original / "whole")


def test_a_lost_model_without_a_checkpoint_is_named(original, tmp_path):
    path = Path(shutil.copytree(original / "whole", tmp_path / "run"))
    shutil.rmtree(path / "checkpoints")
    (path / "model.safetensors").unlink()
    with pytest.raises(FedLDError, match=r"no checkpoint .* is whole"):
        resume(path, warn=lambda text: None)


def test_a_lost_model_of_a_run_that_a_callback_ended_is_named(small, tmp_path):
    run(small(rounds=3), tmp_path / "run", callbacks=[lambda line, model: line["round"] == 1])
    (tmp_path / "run/model.safetensors").unlink()
    with pytest.raises(FedLDError, match=r"the model of round 1, which ended the run, cannot be made again"):
        resume(tmp_path / "run")


def test_files_that_are_not_checkpoints_are_not_read_as_such(original, stopped, contents):
    for name in ("round_x.json", "round_00007.json~", "notes.json", "round_.json"):
        (stopped / "checkpoints" / name).write_text("mine")
    (stopped / "checkpoints/round_00009.json").write_text("not a checkpoint, though it is called one")
    warnings = []
    resume(stopped, warn=warnings.append)
    assert "round 9 cannot be used" in warnings[0]
    assert (stopped / "checkpoints/round_00009.json.damaged").exists()
    assert contents(stopped) == contents(original / "whole")


def test_a_damaged_checkpoint_names_no_states_to_keep(stopped):
    """What a Flower server asks before every message: IndexError once."""
    (stopped / "checkpoints/round_00002.json").write_bytes(b"")
    assert kept_states(stopped / "checkpoints") == {(f"client_{i}", 1) for i in (1, 2, 3)}


def _images(path: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    images = generator.integers(0, 256, (90, 8, 8), np.uint8)
    np.savez(path, images=images, labels=np.arange(90) % 3)


def test_changed_data_is_noticed_on_resume(stopped, tmp_path):
    settings = {"dataset": f"npz:{tmp_path / 'data.npz'}", "clients": 2, "rounds": 2, "workers": 0}
    _images(tmp_path / "data.npz", 0)
    run(make_experiment(settings), tmp_path / "own")
    (tmp_path / "own/summary.json").unlink()
    _images(tmp_path / "data.npz", 1)
    _refuses(tmp_path / "own", "the data is not what the run .* began with .*images or their order")
    _images(tmp_path / "data.npz", 0)
    assert resume(tmp_path / "own")["rounds"] == 2


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('model = "cnn"', 'model = "resnet8"', "checkpoint .* is of a model of .* put back the settings"),
        ("clients = 3", "clients = 4", "client 'client_1': .* images, now"),
    ],
)
def test_settings_that_do_not_fit_the_checkpoint_are_named(stopped, old, new, match):
    text = (stopped / "config.toml").read_text()
    assert old in text
    (stopped / "config.toml").write_text(text.replace(old, new, 1))
    _refuses(stopped, match)


def test_a_model_without_a_finite_loss_is_not_called_safe(small, tmp_path):
    """The update is finite, so the rule takes it; the model it makes gives no numbers."""
    experiment = small(method={"name": "keeping", "poison": 2}, rounds=3, clients=3)
    with pytest.raises(FedLDError, match=r"round 3.*; round 1 is safe"):
        run(experiment, tmp_path / "run")
    rounds = [line["round"] for line in read_lines(tmp_path / "run", ROUNDS)]
    assert rounds[0] == 1
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == [
        "round_00001.json",
        "round_00001.safetensors",
    ]


def _kept(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def test_a_finished_run_keeps_what_extending_needs(original, tmp_path):
    """Two checkpoints and all their states filled 60 GB of the evidence."""
    path = Path(shutil.copytree(original / "whole", tmp_path / "run"))
    assert _kept(path / "checkpoints") == ["round_00003.json", "round_00003.safetensors"]
    assert {name.split(".")[2] for name in _kept(path / "states")} == {"round_00003"}
    assert resume(path, rounds=4)["rounds"] == 4


def test_more_checkpoints_are_kept_if_asked(small, tmp_path):
    run(small(rounds=4, keep_checkpoints=3, clients=2), tmp_path / "run")
    kept = [name for name in _kept(tmp_path / "run/checkpoints") if name.endswith("json")]
    assert kept == ["round_00002.json", "round_00003.json", "round_00004.json"]


def test_what_a_kill_during_a_removal_left_goes_with_the_next_one(stopped):
    """The small file of a checkpoint goes first, so the large one was left for good."""
    for name in ("round_00000.safetensors", "round_00007.json.tmp"):
        (stopped / "checkpoints" / name).write_bytes(b"left")
    resume(stopped)
    assert _kept(stopped / "checkpoints") == ["round_00003.json", "round_00003.safetensors"]
