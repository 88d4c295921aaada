"""The margin-control family against margin_losses.npz (float64, 1e-10)."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedld.local import ContextObjective
from fedld.local.objectives import (
    OBJECTIVES,
    MarginLog,
    Official,
    SigmaDamp,
    SigmaStitch,
    SpectralDecoupling,
    Threshold,
)

FILE = np.load(Path(__file__).parents[1] / "oracles" / "margin_losses.npz", allow_pickle=False)
CASES = sorted({key.split("/")[0] for key in FILE.files} - {"puli"})
F_MARGIN = torch.from_numpy(FILE["puli/f"])
PLAIN = [name for name, value in OBJECTIVES.items() if not isinstance(value, ContextObjective)]
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kind", "key"), [(MarginLog, "paper"), (Official, "official")])
def test_value_and_gradient(case, kind, key):
    logits = torch.from_numpy(FILE[f"{case}/logits"]).double().requires_grad_()
    value = kind(lam=float(FILE[f"{case}/lam"]))(logits, torch.from_numpy(FILE[f"{case}/y"]))
    value.backward()
    np.testing.assert_allclose(value.item(), FILE[f"{case}/{key}_loss_float64"], **CLOSE)
    np.testing.assert_allclose(logits.grad.numpy(), FILE[f"{case}/{key}_grad_float64"], **CLOSE)


def binary(objective, f):
    """Two logits (0, f) with label 1: margin f, squared norm f^2."""
    return objective(torch.stack([torch.zeros_like(f), f])[None], torch.tensor([1])).item()


@pytest.mark.parametrize(
    ("objective", "key"),
    [
        (OBJECTIVES["cross-entropy"], "log"),
        (SigmaDamp(), "sigma_damp_T2_k1.278"),
        (SigmaDamp(scale=1.0), "sigma_damp_T2_noscale"),
        (SigmaStitch(), "sigma_stitch_T1"),
        (SigmaStitch(temperature=2.0), "sigma_stitch_T2"),
    ],
)
def test_binary_margins(objective, key):
    found = [binary(objective, f) for f in F_MARGIN]
    np.testing.assert_allclose(found, FILE[f"puli/{key}"], **CLOSE)


@pytest.mark.parametrize(
    ("objective", "key"),
    [(MarginLog(lam=0.5), "marg_log_lam0.5"), (SpectralDecoupling(lam=0.5), "spectral_decoupling_lam0.5")],
)
def test_binary_penalties(objective, key):
    found = [binary(objective, f) for f in F_MARGIN]
    np.testing.assert_allclose(found, FILE[f"puli/{key}"], **CLOSE)


def test_threshold_is_free_below_its_margin():
    labels, small, large = torch.tensor([0]), torch.tensor([[1.0, 1.0]]), torch.tensor([[3.0, 0.0]])
    objective = Threshold(lam=0.1, margin=2.0)
    assert objective(small, labels) == F.cross_entropy(small, labels)
    torch.testing.assert_close(objective(large, labels), F.cross_entropy(large, labels) + 0.1 * (9 - 4))


@pytest.mark.parametrize("name", [name for name in PLAIN if name != "cross-entropy"])
def test_margin_control_stops_the_growth_of_margins(name):
    """Scaling up a correct prediction always pays under cross-entropy; no longer under margin control.

    `official` acts on probabilities, which saturate: its penalty merely offsets a part of the gain.
    """
    labels, direction = torch.tensor([0]), torch.tensor([[1.0, -1.0]])
    scale = torch.tensor(20.0 if name != "official" else 2.0, requires_grad=True)
    OBJECTIVES[name](scale * direction, labels).backward()
    growth = torch.autograd.grad(F.cross_entropy(scale * direction, labels), scale)[0]
    assert scale.grad > growth


@pytest.mark.parametrize("name", PLAIN)
def test_any_number_of_classes_and_batch_order(name):
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(9, 4, generator=generator).double(), torch.arange(9) % 4
    value, turned = OBJECTIVES[name](logits, labels), OBJECTIVES[name](logits.flip(0), labels.flip(0))
    assert value.isfinite()
    torch.testing.assert_close(value, turned)
