import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from sklearn import metrics as reference

from fedld.errors import FedLDError
from fedld.tasks import Classification
from fedld.tasks.scores import auroc, calibration, confusion, cross_entropy, log_sum_exp

TASK = Classification()


def evaluate(logits, labels):
    """All measures of some predictions, without their number."""
    outputs, targets = torch.as_tensor(np.asarray(logits)), torch.as_tensor(np.asarray(labels, np.int64))
    found = TASK.scores(TASK.sample_tally(outputs, targets))
    assert found.pop("count") == len(targets)
    return found


def sample(classes, n=200, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    logits = rng.normal(size=(n, classes)) + 1.5 * np.eye(classes)[labels]
    return np.round(logits * 8) / 8, labels  # rounded: ties occur, and exactly so


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_measures_agree_with_scikit_learn(classes):
    logits, labels = sample(classes)
    p = torch.softmax(torch.from_numpy(logits), 1).numpy()
    got = evaluate(logits, labels)
    assert got["accuracy"] == reference.accuracy_score(labels, p.argmax(1))
    assert got["balanced_accuracy"] == pytest.approx(
        reference.balanced_accuracy_score(labels, p.argmax(1)), abs=1e-14
    )
    score = np.round(p, 12) if classes > 2 else np.round(p[:, 1], 12)
    assert got["auroc"] == pytest.approx(reference.roc_auc_score(labels, score, multi_class="ovr"), abs=1e-12)
    assert got["loss"] == pytest.approx(reference.log_loss(labels, p), rel=1e-12)
    expected = reference.confusion_matrix(labels, p.argmax(1), labels=range(classes))
    np.testing.assert_array_equal(confusion(logits, labels)[:, :-1], expected)


def test_auroc_of_missing_classes_is_the_mean_over_present_ones():
    logits, labels = sample(4)
    keep = labels != 2
    p = torch.softmax(torch.from_numpy(logits[keep]), 1).numpy().round(12)
    areas = [reference.roc_auc_score(labels[keep] == k, p[:, k]) for k in (0, 1, 3)]
    assert auroc(logits[keep], labels[keep]) == pytest.approx(np.mean(areas), abs=1e-12)


def test_auroc_of_confident_logits_does_not_saturate():
    assert auroc([[0.0, 100.0], [0.0, 90.0], [0.0, 80.0]], [1, 1, 0]) == 1.0


def test_one_class_and_no_sample_are_defined():
    got = evaluate([[2.0, 0.0], [0.0, 1.0]], [0, 0])
    assert (got["accuracy"], got["balanced_accuracy"], got["auroc"]) == (0.5, 0.5, None)
    assert set(evaluate(np.zeros((0, 3)), []).values()) == {None}


def test_diverged_predictions_are_wrong_and_have_no_loss():
    got = evaluate([[1.0, 0.0], [np.nan, 0.0], [np.inf, 0.0]], [0, 0, 1])
    assert got["accuracy"] == pytest.approx(1 / 3)
    assert (got["loss"], got["auroc"], got["ece"]) == (None, None, None)


def test_calibration_by_hand():
    # confidences 0.9 (right) and 0.6 (wrong, right): gaps 0.1/3 + |1.2 - 1|/3
    logits = np.log([[0.9, 0.1], [0.6, 0.4], [0.6, 0.4]])
    result = calibration(logits, [0, 1, 0], bins=10)
    assert result.ece == pytest.approx((0.1 + 0.2) / 3)
    np.testing.assert_array_equal(result.count.nonzero()[0], [5, 8])
    assert result.accuracy[5] == 0.5
    assert np.isnan(result.accuracy[0])


def test_tensors_of_any_precision_are_accepted():
    logits, labels = sample(3)
    tensor = torch.from_numpy(logits).bfloat16()
    single = tensor.float().numpy()
    assert auroc(tensor, torch.from_numpy(labels)) == auroc(single, labels)
    np.testing.assert_array_equal(confusion(tensor, torch.from_numpy(labels)), confusion(single, labels))
    assert cross_entropy(logits, labels) == pytest.approx(
        torch.nn.functional.cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels)).item(),
        rel=1e-12,
    )


@pytest.mark.parametrize(
    ("logits", "labels"), [(np.zeros(3), [0, 1, 0]), (np.zeros((3, 2)), [0, 1]), (np.zeros((2, 1)), [0, 0])]
)
def test_wrong_shapes(logits, labels):
    with pytest.raises(FedLDError, match="logits must be"):
        confusion(logits, labels)


@pytest.mark.parametrize("label", [-1, 2])
def test_labels_out_of_range(label):
    with pytest.raises(FedLDError, match="labels must lie"):
        confusion(np.zeros((2, 2)), [0, label])


@pytest.mark.parametrize("classes", [1, 2, 3, 10])
def test_log_sum_exp_has_the_bits_of_scipy(classes):
    rng = np.random.default_rng(classes)
    rounded = np.round(rng.normal(size=(500, classes)) * 2) / 2  # ties
    for z in (rounded, rng.normal(size=(500, classes)) * 300, np.zeros((3, classes))):
        assert np.array_equal(log_sum_exp(z), logsumexp(z, axis=1))
