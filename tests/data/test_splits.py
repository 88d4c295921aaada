"""Nobody is trained on what is tested: over seeds, over hold-outs, over a patient's images."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedld.config.experiment import make_experiment
from fedld.config.resolve import make_data_spec
from fedld.data import DataSpec, load
from fedld.data.splits import stratified


@pytest.fixture
def cohort(tmp_path):
    """240 images of 60 patients, four each, in three classes."""
    patient = np.char.add("p", (np.arange(240) // 4).astype(str))
    images = np.random.default_rng(0).integers(0, 256, (240, 8, 8), np.uint8)
    np.savez(tmp_path / "own.npz", images=images, labels=np.arange(240) // 4 % 3, patient=patient)
    return f"npz:{tmp_path / 'own.npz'}", tmp_path / "cache", patient


def test_the_test_set_is_the_same_for_every_seed_of_a_run(tmp_path):
    """Tuning on seed 0 once read 280 of the 359 test images of seed 1."""
    specs = [make_data_spec(make_experiment({"dataset": "digits", "seed": seed})) for seed in (0, 1)]
    first, second = (load(spec, tmp_path) for spec in specs)
    assert (first.test == second.test).all()
    assert not np.array_equal(first.clients[0].train, second.clients[0].train)
    held = first.hold_out(0.2, 0)
    assert not np.isin(held.test, second.test).any()
    other = make_data_spec(make_experiment({"dataset": "digits", "data_seed": 1}))
    assert not np.array_equal(load(other, tmp_path).test, first.test)
    assert load(other, tmp_path).fingerprint() != first.fingerprint()


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_no_patient_is_in_training_and_test(cohort, partition):
    dataset, cache, patient = cohort
    federation = load(DataSpec(dataset=dataset, clients=3, partition=partition, min_size=5), cache)
    train = np.concatenate([client.train for client in federation.clients])
    assert 30 <= len(federation.test) <= 60
    assert not set(patient[train]) & set(patient[federation.test])
    held = federation.hold_out(0.3, seed=1)
    left = np.concatenate([client.train for client in held.clients])
    assert len(held.test)
    assert not set(patient[left]) & set(patient[held.test])
    assert not set(patient[left]) & set(patient[federation.test])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=60), st.floats(0.05, 0.95)
)
def test_whole_patients_are_taken_and_never_more_images_than_asked_for(rows, fraction):
    labels = np.array([label for label, _ in rows])
    patients = np.array([f"p{patient}" if patient else "" for _, patient in rows])
    taken = stratified(labels, fraction, np.random.default_rng(0), patients)
    for name in set(patients) - {""}:
        assert taken[patients == name].all() or not taken[patients == name].any()
    assert taken.sum() <= round(fraction * len(rows)) + 4


def test_clients_that_are_asked_for_in_vain_are_mentioned(tmp_path):
    sites = np.array(["oslo", "rome"])[np.arange(90) % 2]
    images = np.random.default_rng(0).integers(0, 256, (90, 8, 8), np.uint8)
    np.savez(tmp_path / "own.npz", images=images, labels=np.arange(90) % 3, site=sites)
    federation = load(DataSpec(dataset=f"npz:{tmp_path / 'own.npz'}", clients=7), tmp_path / "cache")
    assert federation.notes == ("clients = 7 is not used: the data names its own 2 clients",)
    assert federation.describe()["notes"] == list(federation.notes)
