"""The comparison table: exact numbers, columns apart, what is missing stays missing."""

import pytest
from scipy.stats import ttest_rel

from fedld.study.table import make_table


def run(seed: int, accuracy: float | None, personal: float | None = None) -> dict:
    line = {"seed": seed, "bytes_up": 1_000_000, "bytes_down": 2_000_000, "seconds": 4.0}
    for prefix, value in (("", accuracy), ("personal_", personal)):
        if value is not None:
            line |= {f"{prefix}{key}_accuracy": value for key in ("final", "last5", "best")}
    return line


SUMMARIES = {
    "fedavg": [run(0, 0.80), run(1, 0.82), run(2, 0.80)],
    "fedld": [run(0, 0.81), run(1, 0.84), run(2, 0.83)],
    "fedbn": [run(0, 0.70, 0.9), run(1, 0.71, 0.9), run(2, 0.72, 0.9)],
    "local": [run(0, None, 0.6), run(1, None, 0.6), run(2, None, 0.6)],
}


def test_differences_are_paired_by_seed_and_corrected():
    table = make_table("t", SUMMARIES, "fedavg")
    rows = {row.label: row for row in table.rows}
    assert rows["fedavg"].difference is None
    assert rows["fedld"].difference == pytest.approx(2.0)
    low, high = rows["fedld"].interval
    assert (low, high) == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-3)
    assert rows["fedld"].p_value == pytest.approx(0.0742, abs=1e-3)  # the larger of two: Holm leaves it
    assert rows["fedbn"].p_value == pytest.approx(2 * ttest_rel([70, 71, 72], [80, 82, 80]).pvalue)
    assert rows["fedavg"].megabytes == 3.0


def test_global_and_personalised_accuracy_never_share_a_column():
    rows = {row.label: row for row in make_table("t", SUMMARIES, "fedavg").rows}
    assert rows["fedbn"].final == pytest.approx([70, 71, 72])
    assert rows["fedbn"].personal == pytest.approx([90, 90, 90])
    assert rows["local"].final is None
    assert rows["local"].difference is None
    assert rows["local"].cells()[0] == "-"


def test_markdown_escapes_names():
    table = make_table("t", {"a|b": [run(0, 0.5)]}, "a|b")
    assert "a\\|b" in table.to_markdown()
