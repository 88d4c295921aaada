"""The accountant against known numbers; a budget that restarts, crashes and other runs cannot exceed."""

import multiprocessing

import pytest

from fedld.errors import FedLDError
from fedld.privacy import accounting
from fedld.privacy.accounting import NoisySteps, epsilon_of, noise_for
from fedld.privacy.budget import BudgetLedger

ROUND = NoisySteps(1.0, 0.02, 100)


@pytest.fixture(scope="module", autouse=True)
def opacus():
    pytest.importorskip("opacus")


def test_the_accountant_gives_the_known_epsilon():
    """Rate 0.02, noise 1, 1,000 steps: PRV 3.909; prv-accountant 3.849 to 3.949, RDP 4.3242."""
    assert epsilon_of([NoisySteps(1.0, 0.02, 1000)], 1e-5) == pytest.approx(3.909, abs=1e-3)


def test_steps_of_one_kind_add_up_and_none_cost_nothing():
    assert epsilon_of([ROUND] * 10, 1e-5) == epsilon_of([NoisySteps(1.0, 0.02, 1000)], 1e-5)
    assert epsilon_of([NoisySteps(1.0, 0.02, 0)], 1e-5) == 0
    more = epsilon_of([NoisySteps(1.0, 0.02, 1000), NoisySteps(2.0, 0.1, 50)], 1e-5)
    assert more > epsilon_of([NoisySteps(1.0, 0.02, 1000)], 1e-5)


@pytest.mark.parametrize(("epsilon", "rate", "steps"), [(4.0, 0.02, 1000), (1.0, 0.3, 100), (8.0, 1.0, 10)])
def test_noise_for_a_budget_keeps_it_and_is_not_wasteful(epsilon, rate, steps):
    noise = noise_for(epsilon, 1e-5, rate, steps)
    assert 0.95 * epsilon < epsilon_of([NoisySteps(noise, rate, steps)], 1e-5) <= epsilon


def test_impossible_budgets_and_steps_are_refused():
    for call in (
        lambda: noise_for(0, 1e-5, 0.1, 10),
        lambda: epsilon_of([ROUND], 0),
        lambda: NoisySteps(0, 0.1, 10),
        lambda: NoisySteps(1, 1.1, 10),
        lambda: NoisySteps(float("nan"), 0.5, 10),
    ):
        with pytest.raises(FedLDError):
            call()


def test_without_the_extra_a_sentence_says_what_to_install(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(accounting, "import_module", missing)
    with pytest.raises(FedLDError, match=r"fedld\[dp\]"):
        epsilon_of([NoisySteps(1.2345, 0.0321, 77)], 1e-5)


def test_the_budget_stops_a_run_before_it_is_exceeded_also_after_a_restart(tmp_path):
    file = tmp_path / "budget.jsonl"
    rounds = 0
    while epsilon_of([ROUND] * (rounds + 1), 1e-5) <= 2.0:
        BudgetLedger(file, 2.0, 1e-5).spend("first", ROUND)  # a new one each time: as after a restart
        rounds += 1
    with pytest.raises(FedLDError, match="so the run stops here"):
        BudgetLedger(file, 2.0, 1e-5).spend("first", ROUND)
    assert rounds > 1
    assert BudgetLedger(file, 2.0, 1e-5).spent() <= 2.0
    with pytest.raises(FedLDError, match="so the run stops here"):
        BudgetLedger(file, 2.0, 1e-5).spend("second", ROUND)  # another run draws on the same records
    assert BudgetLedger(file, 2.0, 1e-5).spent("second") == 0
    assert file.read_text().count("\n") == rounds


def test_a_damaged_ledger_lets_nothing_through(tmp_path):
    file = tmp_path / "budget.jsonl"
    BudgetLedger(file, 2.0, 1e-5).spend("first", ROUND)
    whole = file.read_bytes()
    for damaged in (
        b"{}\n" + whole,
        b"x\n" + whole,
        b'{"run": "a", "noise": -1, "rate": 1, "steps": 1}\n',
        b"3\n",
    ):
        file.write_bytes(damaged)
        with pytest.raises(FedLDError):
            BudgetLedger(file, 2.0, 1e-5).spend("first", ROUND)
    file.write_bytes(whole + b'{"run": "fir')
    BudgetLedger(file, 2.0, 1e-5).spend("first", ROUND)
    assert file.read_bytes() == whole + whole
    with pytest.raises(FedLDError, match="epsilon > 0"):
        BudgetLedger(file, 0, 1e-5)


def _spend(file):
    for _ in range(5):
        BudgetLedger(file, 50.0, 1e-5).spend("run", ROUND)


def test_processes_at_one_site_do_not_lose_each_others_entries(tmp_path):
    file = tmp_path / "budget.jsonl"
    epsilon_of([ROUND], 1e-5)  # loads the accountant before the forks
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_spend, args=(file,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert file.read_text().count("\n") == 10
