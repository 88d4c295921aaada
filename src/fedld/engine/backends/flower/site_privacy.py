"""Differential privacy at a site: noise that it alone knows, and a budget over all runs, whoever asks.

The server's settings say which epsilon a run has. The site computes its noise from them and from its own
number of records, checks itself that the epsilon is proved for what it is asked to do, and enters the steps
of every training into its ledger before it takes them. Its policy bounds what all entries together cost.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fedld.engine.jobs import CandidateJob, ClientJob, LossJob, PrepareJob, TrainJob
from fedld.errors import FedLDError
from fedld.local.private import PrivateSteps
from fedld.privacy.accounting import NoisySteps
from fedld.privacy.budget import site_ledger
from fedld.privacy.policy import Policy


@dataclass(frozen=True, kw_only=True)
class SitePrivacy:
    """A site's noisy steps in one run, and the ledger of all its runs.

    Args:
        steps: how the site takes the steps of a round.
        folder: the site's own folder of states.
        policy: its budget; without one, or without an epsilon in it, steps are entered and not bounded.
    """

    steps: PrivateSteps
    folder: Path
    policy: Policy | None

    def spend(self, run: str, jobs: Iterable[ClientJob]) -> None:
        """Enter the steps that the jobs of an order are about to take, on disk.

        Args:
            run: identifier of the run.
            jobs: what the server asks for.

        Raises:
            FedLDError: The budget does not suffice, and nothing is entered; or the ledger cannot be used.
        """
        trainings = sum(isinstance(job, TrainJob) for job in jobs)
        if not trainings:
            return
        steps = NoisySteps(self.steps.noise, self.steps.rate, trainings * self.steps.steps)
        site_ledger(self.folder, self.policy).spend(run, steps)


def measures_records(jobs: Iterable[ClientJob]) -> bool:
    """Say whether jobs tell of training records in another way than by an update."""
    return any(isinstance(job, PrepareJob | LossJob | CandidateJob) for job in jobs)


def check_jobs(jobs: Iterable[ClientJob]) -> None:
    """Refuse what has no epsilon in a run with differential privacy.

    Raises:
        FedLDError: A job measures training records.
    """
    if measures_records(jobs):
        raise FedLDError(
            "in a run with differential privacy it trains, and tells nothing else of its training images"
        )
