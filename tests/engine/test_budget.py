"""The ledger of the privacy budget: it ends a run before its budget is exceeded, over runs and restarts."""

import json

import pytest

from fedld.engine.loop import resume, run
from fedld.errors import FedLDError
from fedld.privacy.accounting import NoisySteps, epsilon_of

pytest.importorskip("opacus")
PRIVATE = {
    "dp": "epsilon=4,delta=1e-5,clip=1",
    "client_losses": False,
    "local_steps": 1,
    "rounds": 2,
    "partition": "iid",
}


def entered(folder):
    return {file.stem: [json.loads(line) for line in file.open()] for file in sorted(folder.glob("*.jsonl"))}


def test_the_budget_ends_a_second_run_and_its_resumption(small, tmp_path):
    folder = tmp_path / "budgets"
    settings = PRIVATE | {"dp_budget": 4.5, "dp_ledger": folder}
    run(small(**settings), tmp_path / "first")
    first = entered(folder)
    assert len(first) > 1
    assert all(len(lines) == 2 for lines in first.values())
    with pytest.raises(FedLDError, match=r"privacy budget of this site is epsilon 4\.5"):
        run(small(**settings, seed=1), tmp_path / "second")
    after = entered(folder)
    with pytest.raises(FedLDError, match="so the run stops here"):
        resume(tmp_path / "second")
    for lines in entered(folder).values():
        steps = [NoisySteps(line["noise"], line["rate"], line["steps"]) for line in lines]
        assert epsilon_of(steps, 1e-5) <= 4.5
    assert sum(map(len, after.values())) >= sum(map(len, first.values()))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dp_budget": 4.0}, "belong together"),
        ({"dp": None, "dp_budget": 4.0, "dp_ledger": "x"}, "without noise there is no epsilon"),
    ],
)
def test_half_a_budget_is_refused_before_the_run(small, tmp_path, changes, problem):
    with pytest.raises(FedLDError, match=problem):
        run(small(**{**PRIVATE, **changes}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
