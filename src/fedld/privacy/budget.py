"""A site's privacy budget over all its runs: written down before noise is added, never exceeded."""

import math
from pathlib import Path

from fedld.errors import FedLDError
from fedld.privacy.accounting import NoisySteps, epsilon_of
from fedld.privacy.lines import LockedLines
from fedld.privacy.policy import POLICY, Policy, read_policy

SPENT = "privacy.jsonl"
"""The ledger of a site's privacy budget, in its own folder of states."""


class BudgetLedger:
    """What a site's records have been used for, as lines of JSON in a file that only grows.

    Steps are entered before they are taken, so a crash counts them and never forgets them. Runs on the same
    records compose; the sum over all of them is what the budget bounds.

    Args:
        file: where it lies; made if absent.
        epsilon: the budget.
        delta: at which epsilon is counted.
    """

    def __init__(self, file: Path, epsilon: float, delta: float) -> None:
        if not epsilon > 0 or not 0 < delta < 1:
            raise FedLDError(
                f"a privacy budget needs epsilon > 0 and 0 < delta < 1, not {epsilon:g}, {delta:g}"
            )
        self.epsilon = epsilon
        self.delta = delta
        self._lines = LockedLines(file, "the ledger of the privacy budget")

    def spend(self, run: str, steps: NoisySteps) -> float:
        """Enter steps that are about to be taken, and tell what all together then cost.

        Args:
            run: which run they belong to.
            steps: the steps of a round.

        Raises:
            FedLDError: the budget does not suffice, and nothing is entered; or the ledger cannot be used.
        """
        with self._lines.locked() as lines:
            cost = epsilon_of([*self._entered(), steps], self.delta)
            if cost > self.epsilon:
                raise FedLDError(
                    f"the privacy budget of this site is epsilon {self.epsilon:g} (delta {self.delta:g}); "
                    f"with {steps.steps} more steps it would be {cost:.4g}, so the run stops here"
                )
            lines.append({"run": run, "noise": steps.noise, "rate": steps.rate, "steps": steps.steps})
        return cost

    def spent(self, run: str | None = None) -> float:
        """Epsilon of all that was entered, or of one run."""
        with self._lines.locked():
            return epsilon_of(self._entered(run), self.delta)

    def _entered(self, run: str | None = None) -> list[NoisySteps]:
        try:
            return [
                NoisySteps(float(entry["noise"]), float(entry["rate"]), int(entry["steps"]))
                for entry in self._lines.entries
                if run is None or entry["run"] == run
            ]
        except (KeyError, TypeError, ValueError):
            raise FedLDError(f"the ledger of the privacy budget '{self._lines.file}' is damaged") from None


def site_ledger(folder: Path, policy: Policy | None) -> BudgetLedger:
    """Open the ledger of a site's privacy budget.

    Args:
        folder: the site's own folder of states.
        policy: has the budget; without one, or without an epsilon in it, steps are entered and not bounded.

    Returns:
        The ledger.
    """
    bounds = policy or Policy()
    return BudgetLedger(folder / SPENT, bounds.epsilon or math.inf, bounds.delta)


def spent_line(folder: Path) -> str:
    """Say in one line what a site has spent of its privacy budget, by the policy in its folder.

    Args:
        folder: the site's own folder of states.

    Returns:
        The epsilon of all entries, and the budget.

    Raises:
        FedLDError: the policy or the ledger cannot be read.
    """
    policy = read_policy(folder / POLICY) if (folder / POLICY).exists() else None
    ledger = site_ledger(folder, policy)
    bound = f"of {ledger.epsilon:g} " if math.isfinite(ledger.epsilon) else ""
    return f"privacy: epsilon {ledger.spent():.3g} {bound}spent over all runs (delta {ledger.delta:g})"
