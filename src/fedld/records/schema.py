"""The lines of a run directory as types.

Numbers that are not finite are written as null, so what may diverge is `float | None`. Fields that a line may
lack are those of parts that not every run has (no test set, no decomposition, a client that was left out).
"""

from dataclasses import dataclass
from typing import Any, Generic, Literal, NotRequired, Required, TypedDict, TypeVar

FORMAT = 2
"""Of the records that are written; those of format 1 are read too (`records.format1`)."""

Config = dict[str, Any]
"""The table of a TOML file; `config.experiment` knows its fields."""

Event = dict[str, Any]
"""An event for an observer of a run: `event` names it ("client", "round", "waiting" ...)."""

Scores = dict[str, float | None]
"""Values of measures by name; null where a measure is not defined."""

Reason = Literal["away", "late", "refused", "malformed", "failed", "not finite", "rejected"]
"""Why a client that was drawn is missing from a round.

away        it is not connected, or went away
late        it did not reply in time
refused     the server does not take it: its version, its name, its data
malformed   its reply cannot be read, or is too large
failed      it could not do its work
not finite  its update has numbers that are not finite
rejected    the aggregation did not use its update
"""


class Evaluation(TypedDict, total=False):
    """The models after a round, all in one form: values of measures by name, and `count`, the samples.

    The worst client's value of a measure is a measure of the test set, where clients have test sets.
    """

    test: Scores  # the global model on the global test set
    client_tests: dict[str, Scores]  # the global model on each client's own test set
    validation: Scores  # the global model on the images that the clients set aside
    personal: Scores  # the clients' own models on the global test set: mean over clients
    personal_worst: Scores  # the worst of them
    personal_own: Scores  # the clients' own models, each on its own test set: mean over clients


class Terms(TypedDict, total=False):
    """The terms of Eq. 2 and, where they are estimates, their standard errors.

    The terms are over the clients that were measured: all but those in `not_measured`.
    """

    local_loss: float | None
    shift_loss: float | None
    aggregation_loss: float | None
    global_loss: float | None
    identity_error: float | None
    local_loss_error: float | None
    shift_loss_error: float | None
    aggregation_loss_error: float | None
    total_loss_error: float | None
    not_measured: list[str]  # clients without a measured loss; absent if there are none


class Traffic(TypedDict, total=False):
    """Bytes of a round, counted; under the rule `measured` with its exchange, and the seconds that took."""

    bytes_up: Required[int]
    bytes_down: Required[int]
    measuring_seconds: float


class RoundLine(Evaluation, Terms, Traffic, total=False):
    """A line of rounds.jsonl: what a round did to the model, and what the model is worth after it."""

    round: Required[int]
    clients: int  # that took part
    train_loss: float | None
    client_loss_before: float  # of the incoming model on all training samples of the clients; secure sums
    client_loss_after: float  # of the models that the clients trained, each on its own samples
    update_norm: float | None
    norm_ratio: float | None
    cosine_to_average: float | None
    buffer_disagreement: float | None
    seconds: float
    choices: dict[str, float]  # what the method's server chose by itself, such as a regularisation
    missing: dict[str, Reason]  # drawn clients that are not part of the aggregate; absent if there are none


class TrainingRecord(TypedDict, total=False):
    """What a client measured of its own training; where the server sees sums alone, `seconds` only."""

    before: Scores  # the incoming model on the client's training samples
    after: Scores  # the model that it trained
    steps: float
    train_loss: float | None
    lr: float  # the learning rate in this round
    metrics: dict[str, float]  # what a method measures of its own
    seconds: float


class ClientLine(TrainingRecord, total=False):
    """A line of clients.jsonl: one client in one round, also one that was left out, with the reason."""

    round: Required[int]
    index: Required[int]
    client: Required[str]
    size: int
    label_counts: list[int]
    update_norm: float
    cosine_to_aggregate: float
    excluded: str
    reason: Reason  # of being excluded


class TrialRecord(TypedDict):
    """What the clients measured under the rule `measured` (`aggregation.measured.Trial` explains it)."""

    rules: list[str]
    lengths: list[float]
    losses: list[float | None]
    errors: list[float | None]
    chosen: int
    gain: float
    votes: dict[str, int]
    left_out: dict[str, str]
    fallback: str | None


class OutlierRecord(TypedDict):
    """A client that stands out of the others, by `kind`: length or direction."""

    client: str
    kind: str
    value: float
    z: float


class SketchErrorRecord(TypedDict):
    """How far a sketched Gram matrix may be off (`aggregation.report.SketchError` explains it)."""

    buckets: int
    seed: int
    gram: float
    update: float | None


class ConflictLine(TypedDict):
    """A line of conflict.jsonl: an aggregation's `Report`, which explains its fields, and its clients."""

    round: int
    sampled: list[int]
    clients: list[str]
    weights: list[float]
    rejected: dict[str, str]
    capped: dict[str, float]
    outliers: list[OutlierRecord]
    coefficients: dict[str, list[float]]
    norms: list[float]
    cosines: list[float]
    norm_ratio: float
    cosine: float
    eigenvalues: list[float]
    kept: int
    kept_energy: float
    votes_for: list[int]
    votes_against: list[int]
    weight_for: list[float]
    weight_against: list[float]
    eigen_gap: float
    sign_margin: float
    gram: list[list[float]]
    gram_clients: list[str]  # of the rows and columns of `gram`: in a large round a part of the clients
    trial: TrialRecord | None
    sketch: SketchErrorRecord | None


class CrossMatrix(TypedDict):
    """M[j, i] = L_j(w_i): all clients' data in rows, the sampled clients' models in columns."""

    sampled: list[int]
    cross_loss: list[list[float]]
    standard_errors: list[list[float]] | None
    not_measured: NotRequired[list[str]]  # clients with missing losses: nan is no divergence there


class CrossLine(CrossMatrix):
    """A line of cross_loss.jsonl: the matrix, and L_j(w) of the aggregate on every client's data."""

    round: int
    clients: list[str]
    sizes: list[int]
    global_losses: list[float] | None  # None: the method has no global model
    global_errors: list[float] | None


class Environment(TypedDict):
    """The machine and the libraries that computed a result; processors may differ in the last bits."""

    python: str
    torch: str
    numpy: str
    platform: str
    processor: str
    instructions: str  # the instruction set that torch computes with
    cpus: int | None
    threads: int
    blas: str


class ParticipationRecord(TypedDict):
    """A client over a whole run: rounds it was drawn in and took part in, and reasons with their numbers."""

    drawn: int
    took_part: int
    missing: dict[Reason, int]
    gone_since: int | None  # the first round of an absence that lasted to the end


class SeriesScores(TypedDict, total=False):
    """A run's evaluations of one kind: the last, the mean of the last five, the best of every measure."""

    final: Scores
    last5: Scores
    best: Scores


class Validated(TypedDict):
    """The best round by the clients' validation images, and the test set then."""

    round: int
    test: Scores


class FinalMeasures(TypedDict, total=False):
    """What a run came to, and the traffic of all rounds."""

    test: SeriesScores
    personal: SeriesScores
    validated: Validated
    bytes_up: Required[int]
    bytes_down: Required[int]


CASES = "cases.npz"
"""Pictures, true and predicted masks of some test cases, where a mask is predicted."""
Which = Literal["global", "personal"]
"""The global model, or the client's own."""


class Interval(TypedDict):
    """An estimate with its 95 % interval (`analysis.intervals.Estimate`)."""

    value: float | None
    low: float | None
    high: float | None


class SiteMeasures(TypedDict):
    """A model on one site's own test pictures (`analysis.sites.SiteResult`)."""

    pictures: int
    patients: int | None
    accuracy: Interval
    auroc: Interval
    sensitivity: Interval  # for the last class, at the specificity that the run's settings name


class CaseMeasures(TypedDict):
    """Means over the cases of one site's own test set (`analysis.sites.CaseResult`)."""

    pictures: int
    patients: int | None
    measures: dict[str, Interval]


class RunFacts(TypedDict):
    """run.json: what a reader must know before it reads the other files."""

    format: int
    task: str
    measures: list[dict[str, Any]]  # `fedld.tasks.Measure` as plain data, the first one decides


class Summary(FinalMeasures):
    """summary.json: the result and what it is the result of."""

    format: int
    rounds: int
    seconds: float
    finished: str  # date and time in UTC
    method: str
    dataset: str
    model: str
    parameters: int  # of the whole network
    trained_parameters: int  # that move; the rest is frozen
    private_parameters: int  # that stay with the clients
    clients: int
    max_update_ratio: float | None  # longer updates than so many times the median were refused; null: none
    seed: int
    version: str
    environment: Environment
    participation: dict[str, ParticipationRecord]
    sites: dict[str, dict[Which, SiteMeasures]]  # of each site that has a test set of its own
    cases: NotRequired[dict[str, dict[Which, CaseMeasures]]]  # the same where every case is judged by itself
    sha256: dict[str, str]  # of the records and of what was written with the summary


class Reliability(TypedDict):
    """A reliability diagram: mean confidence and accuracy of every bin, null where it is empty."""

    confidence: list[float | None]
    accuracy: list[float | None]
    count: list[int]
    ece: float | None


class Predictions(TypedDict):
    """predictions.json: confusion (last column: no finite prediction) and calibration of the final model."""

    classes: list[str]
    confusion: list[list[int]]
    calibration: Reliability


class StudyEntry(TypedDict):
    """A run of a study."""

    label: str
    method: str
    seed: int
    path: str
    settings: str  # the experiment as TOML


class StudyIndex(TypedDict):
    """study.json."""

    format: int
    name: str
    command: str
    baseline: str
    primary: str  # the measure that decides
    target: str  # the accuracy to be reached, as `fedld.study.measures` reads it
    runs: list[StudyEntry]


RoundColumn = Literal[
    "local_loss",
    "shift_loss",
    "aggregation_loss",
    "global_loss",
    "norm_ratio",
    "cosine_to_average",
    "bytes_up",
    "bytes_down",
    "seconds",
]
"""A number of a round beside the measures, which tables and curves show."""

L = TypeVar("L")


@dataclass(frozen=True)
class RecordFile(Generic[L]):
    """A record file: its name, the type of its lines, and the fields that tell them apart."""

    name: str
    line: type[L]
    key: tuple[str, ...] = ("round",)
    needs: tuple[str, ...] = ()  # without which a line says nothing


ROUNDS = RecordFile("rounds.jsonl", RoundLine)
CLIENTS = RecordFile("clients.jsonl", ClientLine, ("round", "index"), ("client",))
CONFLICT = RecordFile("conflict.jsonl", ConflictLine)
CROSS_LOSS = RecordFile("cross_loss.jsonl", CrossLine)
FAILED = "failed.txt"
REFUSED = "failed.json"
"""In a study's folder: why runs could not be begun or continued, by their path in the study."""
FILES: tuple[RecordFile[Any], ...] = (ROUNDS, CLIENTS, CONFLICT, CROSS_LOSS)
