"""Clients' states lie on disk under their names, whatever these are."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedld.engine.client_data import StateStore
from fedld.errors import FedLDError

NAMES = st.lists(st.text(st.characters(codec="utf-8"), max_size=300), min_size=2, max_size=5, unique=True)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(names=NAMES)
def test_every_name_has_a_state_of_its_own(tmp_path, names):
    store = StateStore(tmp_path / "states")
    for number, name in enumerate(names):
        store.save(name, 1, {"x": torch.tensor([float(number)])})
    assert [store.load(name, 1)["x"].item() for name in names] == list(range(len(names)))
    store.prune({(names[0], 1)})
    assert len(list(store.folder.iterdir())) == 1
    store.check({names[0]: 1, names[1]: 0})


def test_a_damaged_state_is_said_without_its_path(tmp_path):
    """A site tells its server what went wrong, and no path of its own."""
    store = StateStore(tmp_path / "states")
    store.save("east", 1, {"x": torch.zeros(1)})
    (file,) = store.folder.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    for round_ in (1, 2):
        with pytest.raises(FedLDError, match=f"kept in round {round_} is damaged: ") as caught:
            store.load("east", round_)
        assert str(tmp_path) not in str(caught.value)


def test_names_that_look_like_paths_stay_in_the_folder(tmp_path):
    store = StateStore(tmp_path / "states")
    for name in ("../up", "a/b", "a_b", "/etc/passwd", "."):
        store.save(name, 3, {"x": torch.zeros(1)})
    assert len(list(store.folder.iterdir())) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["states"]
