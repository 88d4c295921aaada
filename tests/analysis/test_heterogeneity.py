import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon
from scipy.stats import chi2_contingency

from fedld.analysis.heterogeneity import feature_distances, feature_shift, image_features, label_measures
from fedld.errors import FedLDError

COUNTS = np.array([[30, 5, 0], [10, 10, 10], [0, 0, 25], [7, 1, 2]])


def test_label_distances_agree_with_scipy():
    measures = label_measures(COUNTS)
    for i, a in enumerate(COUNTS):
        for j, b in enumerate(COUNTS):
            assert measures.jensen_shannon[i, j] == pytest.approx(jensenshannon(a, b, base=2), abs=1e-7)
            hellinger = np.linalg.norm(np.sqrt(a / a.sum()) - np.sqrt(b / b.sum())) / 2**0.5
            assert measures.hellinger[i, j] == pytest.approx(hellinger, abs=1e-7)
    np.testing.assert_allclose(measures.effective_classes[[1, 2]], [3, 1])
    expected = chi2_contingency(COUNTS, lambda_="log-likelihood").pvalue
    assert measures.p_value == pytest.approx(expected, rel=1e-9)
    assert measures.size_imbalance == pytest.approx(np.std([35, 30, 25, 10]) / 25)
    assert measures.effective_clients == pytest.approx(100**2 / (35**2 + 30**2 + 25**2 + 10**2))


def test_chance_is_not_skew():
    """Small iid clients differ by chance; the corrected skew stays near zero where raw distances do not."""
    rng = np.random.default_rng(0)
    skews, p_values = [], []
    for _ in range(200):
        measures = label_measures(rng.multinomial(60, [0.1] * 10, size=8))
        skews.append(measures.skew)
        p_values.append(measures.p_value)
    assert measures.jensen_shannon[np.triu_indices(8, 1)].mean() > 0.15
    assert np.quantile(skews, 0.99) < 0.2
    assert 0.02 < np.mean(np.array(p_values) < 0.1) < 0.2


def test_skew_grows_with_dirichlet_concentration():
    rng = np.random.default_rng(0)
    skews = []
    for alpha in (100, 1, 0.1):
        shares = rng.dirichlet([alpha] * 5, size=10)
        skews.append(label_measures([rng.multinomial(500, share) for share in shares]).skew)
    assert skews == sorted(skews)
    assert skews[0] < 0.1
    assert skews[2] > 0.5


def test_client_without_data():
    measures = label_measures([[5, 5], [0, 0], [5, 5]])
    assert np.isnan(measures.jensen_shannon[0, 1])
    assert (measures.skew, measures.p_value) == (0.0, 1.0)
    alone = label_measures([[5, 5]])
    assert (alone.skew, alone.p_value, alone.size_imbalance, alone.effective_clients) == (0.0, 1.0, 0.0, 1.0)


@pytest.mark.parametrize("counts", [[1, 2], [[0, 0]], [[-1, 2]], [[np.nan, 1]]])
def test_bad_counts(counts):
    with pytest.raises(FedLDError, match="label counts"):
        label_measures(counts)


def test_feature_shift_is_free_of_scale_and_chance():
    rng = np.random.default_rng(0)
    sizes = np.array([40, 60, 80])
    for scale in (1, 1000):
        for distance in (0.0, 2.0):
            samples = [
                scale * (rng.normal(size=(n, 50)) + distance * 50**0.5 * np.eye(50)[k])
                for k, n in enumerate(sizes)
            ]
            means = [x.mean(0) for x in samples]
            spreads = [np.sqrt(((x - x.mean(0)) ** 2).sum(1).mean()) for x in samples]
            shift = feature_shift(feature_distances(means, spreads), sizes)
            assert shift == pytest.approx(distance * 2**0.5, abs=0.1)
    with pytest.raises(FedLDError, match="mean features"):
        feature_distances([[1.0]], [1.0, 2.0])


def test_image_features_see_a_camera_and_not_the_labels():
    rng = np.random.default_rng(0)
    labels = np.array([0] * 90 + [1] * 90)
    images = (rng.integers(0, 60, (180, 4, 4, 3)) + 60 * labels[:, None, None, None]).astype(np.uint8)
    skewed = [np.arange(0, 120), np.arange(120, 180)]  # other labels, one camera
    means, spreads = image_features(images, labels, skewed)
    assert feature_shift(feature_distances(means, spreads), [120, 60]) < 0.25
    half = [np.arange(0, 180, 2), np.arange(1, 180, 2)]
    images[1::2, ..., 0] += 40  # a red cast at the second client
    means, spreads = image_features(images, labels, half)
    assert feature_shift(feature_distances(means, spreads), [90, 90]) > 0.5
