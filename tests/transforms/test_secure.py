"""The secure sum as a transform: the plain sum within the fixed-point error, and refusals."""

import pytest
import torch

from fedld.errors import FedLDError
from fedld.layout import Layout
from fedld.models import build
from fedld.transforms import BUFFERS, PARAMETERS, UPDATE_ENTRIES, SummedEntry
from fedld.transforms.secure import SecureSummation

LAYOUT = Layout.of(build("resnet8", classes=2, image_size=8, seed=0))
NAMES = ("one client", "zürich", "client.3", "d")


def messages(scale=0.1):
    generator = torch.Generator().manual_seed(0)
    buffers = LAYOUT.shared_end - LAYOUT.trainable
    return {
        name: {
            PARAMETERS: scale * torch.randn(LAYOUT.shared, generator=generator),
            BUFFERS: 100 * torch.rand(buffers, generator=generator),
        }
        for name in NAMES
    }


def test_the_total_is_the_weighted_sum_within_the_fixed_point_error():
    given, weights = messages(), {name: 10.0 * (k + 1) for k, name in enumerate(NAMES)}
    total = SecureSummation().total(given, weights, UPDATE_ENTRIES)
    assert total.clients == NAMES
    assert total.weight == 100
    for key, error in ((PARAMETERS, 1e-10), (BUFFERS, 1e-4)):
        exact = sum(weights[name] * given[name][key].double() for name in NAMES)
        torch.testing.assert_close(total.sums[key], exact, rtol=0, atol=error)


def test_a_layout_without_buffers_is_summed():
    layout = Layout.of(build("cnn", classes=2, image_size=8, seed=0))
    given = {name: {PARAMETERS: torch.ones(layout.shared), BUFFERS: torch.zeros(0)} for name in NAMES}
    total = SecureSummation().total(given, dict.fromkeys(NAMES, 1.0), UPDATE_ENTRIES)
    exact = torch.full((layout.shared,), 4.0, dtype=torch.float64)
    torch.testing.assert_close(total.sums[PARAMETERS], exact)
    assert len(total.sums[BUFFERS]) == 0


def test_entries_keep_their_shapes_and_only_weighted_ones_are_weighted():
    given = {
        name: {"a": torch.full((2, 3), 0.5), "b": torch.tensor(float(k))} for k, name in enumerate(NAMES)
    }
    entries = {"a": SummedEntry(1.0), "b": SummedEntry(10.0, weighted=False)}
    total = SecureSummation().total(given, dict.fromkeys(NAMES, 5.0), entries)
    torch.testing.assert_close(total.sums["a"], torch.full((2, 3), 10.0, dtype=torch.float64))
    assert total.sums["b"].item() == pytest.approx(6.0)
    assert total.means(entries)["a"][0, 0].item() == pytest.approx(0.5)


def test_two_clients_or_a_number_beyond_the_bound_are_refused():
    given = messages()
    few = {name: given[name] for name in NAMES[:2]}
    with pytest.raises(FedLDError, match="at least 3 sites"):
        SecureSummation().total(few, dict.fromkeys(few, 1.0), UPDATE_ENTRIES)
    given["d"][PARAMETERS][5] = 2000.0
    with pytest.raises(FedLDError, match="beyond its bound"):
        SecureSummation().total(given, dict.fromkeys(NAMES, 1.0), UPDATE_ENTRIES)
