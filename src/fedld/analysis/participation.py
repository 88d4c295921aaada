"""Who took part in which round, who was missing, since when and why. From the lines of clients.jsonl."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fedld.records.schema import ClientLine


@dataclass(frozen=True)
class Absence:
    """A client that was asked and whose update was not used, in one round or several."""

    client: str
    rounds: tuple[int, ...]  # in which it was missing
    asked: int  # rounds in which it was sampled
    until_end: bool  # missing in every round that asked for it, from some round to the last
    reasons: dict[str, int]
    share: float | None  # of all clients' samples

    @property
    def since(self) -> int:
        """First round of the absence; of the one that lasts, if it lasts."""
        gaps = [b for a, b in zip(self.rounds, self.rounds[1:], strict=False) if b > a + 1]
        return gaps[-1] if self.until_end and gaps else self.rounds[0]

    @property
    def reason(self) -> str:
        """The one given most often."""
        return max(self.reasons, key=lambda why: self.reasons[why])

    def sentence(self) -> str:
        """The absence in one sentence."""
        when = f"from round {self.since} on" if self.until_end else _rounds(self.rounds)
        data = "" if self.share is None else f"; it holds {self.share:.0%} of the data"
        count = f"{len(self.rounds)} of {self.asked} rounds"
        return f"{self.client} is missing {when} ({count}): {self.reason}{data}."


@dataclass(frozen=True)
class Participation:
    """Every client by round: used, missing with a reason, or not asked."""

    lines: Sequence[ClientLine]

    @cached_property
    def rounds(self) -> list[int]:
        """All recorded rounds."""
        return sorted({line["round"] for line in self.lines})

    @cached_property
    def clients(self) -> list[str]:
        """Names, in the order of the federation."""
        return [name for _, name in sorted({line["index"]: line["client"] for line in self.lines}.items())]

    @cached_property
    def missing(self) -> dict[tuple[str, int], str]:
        """Reason of every absence by client and round."""
        return {(x["client"], x["round"]): str(x["excluded"]) for x in self.lines if "excluded" in x}

    @cached_property
    def asked(self) -> set[tuple[str, int]]:
        """Client and round of everybody who was sampled."""
        return {(line["client"], line["round"]) for line in self.lines}

    @cached_property
    def absences(self) -> list[Absence]:
        """One for each client that was ever missing, those with most data first."""
        sizes = {line["client"]: line.get("size") or 0 for line in self.lines}
        total = sum(sizes.values())
        found = []
        for client in self.clients:
            asked = [r for r in self.rounds if (client, r) in self.asked]
            gone = tuple(r for r in asked if (client, r) in self.missing)
            if gone:
                reasons = Counter(self.missing[client, r] for r in gone)
                share = sizes[client] / total if total else None
                found.append(Absence(client, gone, len(asked), gone[-1] == asked[-1], dict(reasons), share))
        return sorted(found, key=lambda one: -(one.share or 0.0) * len(one.rounds))


def _rounds(rounds: tuple[int, ...]) -> str:
    """Rounds in words.

    >>> _rounds((3,)), _rounds((2, 5, 9, 11))
    ('in round 3', 'in rounds 2, 5, 9 ...')
    """
    if len(rounds) == 1:
        return f"in round {rounds[0]}"
    return "in rounds " + ", ".join(map(str, rounds[:3])) + (" ..." if len(rounds) > 3 else "")
