"""Charts of update conflict: principal spectrum, measured steps, and client x client matrices.

A page holds every matrix as half-precision numbers in base64; long runs are thinned to fit the budget.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.ticker import MaxNLocator

from fedld.analysis.updates import chosen_step
from fedld.records.reader import Run, by_label, clean, longest_run
from fedld.records.schema import ConflictLine, CrossLine, TrialRecord
from fedld.study.report.chart import (
    DIVERGING,
    MUTED,
    SECOND,
    SEQUENTIAL,
    SERIES,
    SURFACE,
    Chart,
    Floats,
    Look,
    drawing,
    frame_of,
    legend,
    new_figure,
    settle,
    short,
)

BUDGET = 1_500_000  # bytes of a page for one kind of matrix
MOST_CLIENTS = 64  # clients; more cells than that cannot be seen

Matrices = dict[int, Floats]


def cross_loss_chart(runs: Sequence[Run]) -> Chart | None:
    """Draw L_j(w_i), model of client i on the data of client j, for one seed of every method."""
    frames, names = _collect(runs, "cross_loss")
    values = [matrix.ravel() for by_round in frames.values() for matrix in by_round.values()]
    finite = np.array([v for some in values for v in some[np.isfinite(some)]])
    if not finite.size:
        return None
    scale = (float(finite.min()), float(np.quantile(finite, 0.99)))
    return _heat_chart(
        frames,
        names,
        scale if scale[1] > scale[0] else (scale[0], scale[0] + 1e-3),
        SEQUENTIAL,
        name="cross-loss",
        title="Cross loss: every client's model on every client's data",
        note="High off the diagonal: a model that does not carry over. The diagonal is the loss at home.",
        axes=("model of client", "data of client"),
    )


def cosine_chart(runs: Sequence[Run]) -> Chart | None:
    """Draw the cosine between the updates of every two clients, from the Gram matrix."""
    frames, names = _collect(runs, "conflict")
    if not any(frames.values()):
        return None
    return _heat_chart(
        frames,
        names,
        (-1.0, 1.0),
        DIVERGING,
        name="cosine",
        title="Update conflict: cosine between clients",
        note="Blue: updates agree. Red: they pull apart, and an average cancels them.",
        axes=("client", "client"),
    )


def _collect(runs: Sequence[Run], kind: str) -> tuple[dict[str, Matrices], dict[str, list[str]]]:
    frames: dict[str, Matrices] = {}
    names: dict[str, list[str]] = {}
    for label, method_runs in by_label(runs).items():
        run = longest_run(method_runs)
        clients = dict(list(run.client_names.items())[:MOST_CLIENTS])
        made = (
            {line["round"]: _cross(line, list(clients)) for line in run.cross_loss.lines}
            if kind == "cross_loss"
            else {line["round"]: _cosines(line, list(clients.values())) for line in run.conflict.lines}
        )
        matrices = {round_: matrix for round_, matrix in made.items() if matrix is not None}
        if matrices:
            frames[label], names[label] = matrices, list(clients.values())
    return _thin(frames), names


def _thin(frames: dict[str, Matrices]) -> dict[str, Matrices]:
    """Choose evenly spaced rounds, with the first and the last, within the budget."""
    size = sum(next(iter(f.values())).size * 2 * 4 / 3 for f in frames.values())
    most = max(2, int(BUDGET / size)) if size else 0
    thinned = {}
    for label, by_round in frames.items():
        rounds = list(by_round)
        keep = np.unique(np.linspace(0, len(rounds) - 1, min(most, len(rounds))).round().astype(int))
        thinned[label] = {rounds[k]: by_round[rounds[k]] for k in keep}
    return thinned


def _cross(line: CrossLine, clients: list[int]) -> Floats | None:
    """Read a matrix: rows are data of client j, columns models of client i, nan where it was not sampled."""
    sampled, matrix = line.get("sampled"), _matrix(line.get("cross_loss"))
    if matrix is None or not isinstance(sampled, list) or matrix.shape[1] != len(sampled):
        return None
    return _placed(matrix, list(range(len(matrix))), sampled, clients)


def _cosines(line: ConflictLine, clients: list[str]) -> Floats | None:
    client_names, gram = line.get("gram_clients", line.get("clients")), _matrix(line.get("gram"))
    if gram is None or not isinstance(client_names, list) or gram.shape != (len(client_names),) * 2:
        return None
    norms = np.sqrt(np.maximum(np.diagonal(gram), 0))
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = np.clip(gram / np.outer(norms, norms), -1, 1)
    names = [clean(name) for name in client_names]
    return _placed(cosines, names, names, clients)


def _placed(matrix: Floats, rows: list[Any], columns: list[Any], clients: list[Any]) -> Floats | None:
    """Reorder a matrix by the displayed clients; nan where it has no entry of theirs."""
    full = np.full((len(clients),) * 2, np.nan)
    (at, out), (side, to) = (_places(present, clients) for present in (rows, columns))
    if not at or not side:
        return None
    full[np.ix_(out, to)] = matrix[np.ix_(at, side)]
    return full


def _places(present: list[Any], clients: list[Any]) -> tuple[list[int], list[int]]:
    """Find the positions of the displayed clients in a matrix, and among the displayed ones."""
    place = {str(client): k for k, client in enumerate(clients)}
    pairs = [(k, place[str(client)]) for k, client in enumerate(present) if str(client) in place]
    return [k for k, _ in pairs], [k for _, k in pairs]


def _matrix(value: Any) -> Floats | None:
    try:
        matrix = np.array([[np.nan if x is None else x for x in row] for row in value], dtype=np.float64)
    except (TypeError, ValueError):
        return None
    return matrix if matrix.ndim == 2 and matrix.size else None


def encode(frames: Matrices) -> str:
    """Encode all matrices one after another as little-endian half-precision numbers, in base64."""
    stacked = np.stack(list(frames.values()))
    return base64.b64encode(np.clip(stacked, -65504, 65504).astype("<f2").tobytes()).decode()


def _heat_chart(
    frames: Mapping[str, Matrices],
    names: Mapping[str, list[str]],
    scale: tuple[float, float],
    colours: ListedColormap,
    *,
    name: str,
    title: str,
    note: str,
    axes: tuple[str, str],
) -> Chart:
    label = next(iter(frames))
    last, clients = list(frames[label])[-1], names[label]
    matrix = frames[label][last]
    with drawing():
        figure = new_figure(560, 480)
        ax = figure.add_subplot()
        mesh = ax.pcolormesh(
            matrix, cmap=colours, vmin=scale[0], vmax=scale[1], edgecolor=SURFACE, linewidth=0.4
        )
        mesh.set_gid("part-mesh")
        _name_axes(ax, clients, axes)
        bar = figure.colorbar(mesh, ax=ax, fraction=0.05, pad=0.03)
        bar.outline.set_visible(False)
        settle(figure)
    heat = {
        "box": frame_of(ax),
        "scale": scale,
        "ramp": "q" if colours is SEQUENTIAL else "d",
        "axes": axes,
        "runs": [
            {"label": k, "clients": names[k], "rounds": list(f), "data": encode(f)} for k, f in frames.items()
        ],
    }
    return Chart(
        name=name,
        title=title,
        note=note,
        summary=(
            f"{title}; {label}, round {last}. Values from {np.nanmin(matrix):.3f} to {np.nanmax(matrix):.3f}."
        ),
        figure=figure,
        columns=("method", "round", axes[1] + (" (row)" if axes[0] == axes[1] else ""), axes[0], "value"),
        rows=[
            (k, list(f)[-1], names[k][j], names[k][i], float(list(f.values())[-1][j, i]))
            for k, f in frames.items()
            for j in range(len(names[k]))
            for i in range(len(names[k]))
        ],
        heat=heat,
    )


def _name_axes(ax: Any, clients: list[str], titles: tuple[str, str]) -> None:
    every = max(1, len(clients) // 25)
    ticks = np.arange(0, len(clients), every)
    labels = [short(clients[k], 14) for k in ticks]
    rotated = len(clients) > 6 or max(map(len, labels)) > 8
    ax.set_xticks(ticks + 0.5, labels, rotation=90 if rotated else 0, fontsize=9.5)
    ax.set_yticks(ticks + 0.5, labels, fontsize=9.5)
    ax.tick_params(length=0)
    ax.set_xlabel(titles[0], color=SECOND)
    ax.set_ylabel(titles[1], color=SECOND)
    ax.invert_yaxis()
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set_visible(False)


AXES = 12
PANELS = 9


def spectrum_chart(runs: Sequence[Run]) -> Chart | None:
    """Share of every axis in the last round, split by the clients that point along it or against it."""
    last = {
        label: _last(longest_run(method_runs)) for label, method_runs in list(by_label(runs).items())[:PANELS]
    }
    spectra = {label: line for label, line in last.items() if line is not None}
    if not spectra:
        return None
    columns = 1 if len(spectra) <= 4 else 2
    rows = -(-len(spectra) // columns)
    with drawing():
        figure = new_figure(560, 80 + 128 * rows)
        axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for ax, (label, line) in zip(axes, spectra.items(), strict=False):
            _draw(ax, line)
            ax.set_title(f"{short(label)}, round {line['round']}")
        axes[0].set_ylim(0, 1.25 * max(axis[0] for line in spectra.values() for axis in line["axes"]))
        for ax in axes[len(spectra) :]:
            ax.set_visible(False)
        figure.supxlabel("principal axis", fontsize=11)
        figure.supylabel("share of energy (%)", fontsize=11)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=3)
        settle(figure)
    first = {label: line["axes"][0] for label, line in spectra.items()}
    return Chart(
        name="spectrum",
        title="Principal spectrum with votes",
        note="Above the bars: clients for : against. An axis with as many against it as for it is a "
        "conflict, "
        "not a common direction. Grey: not used.",
        summary="First axis: "
        + "; ".join(f"{k} {a[0]:.0f} % of energy, {a[1]} for, {a[2]} against" for k, a in first.items()),
        figure=figure,
        columns=("method", "round", "axis", "energy_percent", "votes_for", "votes_against", "kept"),
        rows=[
            (label, line["round"], k + 1, *axis, int(k < line["kept"]))
            for label, line in spectra.items()
            for k, axis in enumerate(line["axes"])
        ],
    )


def _last(run: Run) -> dict[str, Any] | None:
    """Read the axes of the last round as (energy in percent, votes for, votes against)."""
    for line in reversed(run.conflict.lines):
        values = [v for v in line.get("eigenvalues") or [] if isinstance(v, int | float)]
        total = sum(values)
        if total > 0:
            votes = zip(line.get("votes_for") or [], line.get("votes_against") or [], strict=False)
            padded = [*votes, *[(0, 0)] * len(values)]
            axes = [(100 * v / total, *padded[k]) for k, v in enumerate(values[:AXES])]
            return {"round": line["round"], "axes": axes, "kept": line.get("kept") or 0}
    return None


def _draw(ax: Any, line: dict[str, Any]) -> None:
    """Draw bars: blue is the share of the votes for, red against, grey an axis that is not used."""
    for k, (energy, plus, minus) in enumerate(line["axes"]):
        votes = plus + minus
        share = energy * plus / votes if votes else 0.0
        if votes:
            ax.bar(k + 1, share, 0.7, color=SERIES[0], edgecolor=SURFACE, label="" if k else "votes for")
            ax.bar(
                k + 1, energy - share, 0.7, share, color=SERIES[5], edgecolor=SURFACE,
                label="" if k else "votes against",
            )  # fmt: skip
            ax.annotate(
                f"{plus}:{minus}",
                (k + 1, energy),
                (0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=9,
            )
        else:
            ax.bar(k + 1, energy, 0.7, color=MUTED, edgecolor=SURFACE)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(axis="x", visible=False)


def measured_chart(runs: Sequence[Run], styles: Mapping[str, Look]) -> Chart | None:
    """Draw the chosen candidate of every round and its measured gain over the plain average."""
    trials_by_method: dict[str, list[tuple[int, TrialRecord]]] = {}
    for label, method_runs in by_label(runs).items():
        lines = longest_run(method_runs).conflict.lines
        trials = [(line["round"], trial) for line in lines if (trial := line.get("trial"))]
        if trials:
            trials_by_method[label] = trials
    if not trials_by_method:
        return None
    order = sorted({_key(trial) for trials in trials_by_method.values() for _, trial in trials})
    with drawing():
        figure = new_figure(1140, 120 + max(160, 24 * len(order)))
        left, right = figure.subplots(1, 2)
        for k, (label, trials) in enumerate(trials_by_method.items()):
            rounds, look = [r for r, _ in trials], styles[label]
            shift = 0.12 * (k - (len(trials_by_method) - 1) / 2)
            heights = [order.index(_key(trial)) + shift for _, trial in trials]
            (dots,) = left.plot(
                rounds, heights, "o", color=look.colour, markersize=8, markeredgecolor=SURFACE
            )
            (line,) = right.plot(rounds, [trial["gain"] for _, trial in trials], marker="o", **look.plot)
            for part in (dots, line):
                part.set_gid(f"part-series-{look.slot}")
        left.set_yticks(range(len(order)), [name for _, _, name in order])
        left.set_ylim(-0.6, len(order) - 0.4)
        left.set_title("Step that was measured as best")
        right.set_title("Measured gain in loss over the plain average")
        right.axhline(0, color=MUTED, linewidth=1, zorder=0)
        for ax in (left, right):
            ax.set_xlabel("round")
            ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        settle(figure)
    sentences = [
        f"{label}: another step than the average in {sum(t['chosen'] != 0 for _, t in trials)} of "
        f"{len(trials)} rounds"
        for label, trials in trials_by_method.items()
    ]
    return Chart(
        name="measured-steps",
        title="Steps that the clients measured",
        note=(
            "Lengths are multiples of the rule's own step. Where the plain average wins, nothing was gained."
        ),
        summary="; ".join(sentences) + ".",
        figure=figure,
        columns=("method", "round", "rule", "length", "gain", "fallback"),
        rows=[
            (label, r, t["rules"][t["chosen"]], t["lengths"][t["chosen"]], t["gain"], t["fallback"])
            for label, trials in trials_by_method.items()
            for r, t in trials
        ],
        legend=legend(trials_by_method, styles),
        wide=True,
    )


def _key(trial: TrialRecord) -> tuple[str, float, str]:
    """Order of the candidates: by rule, then by length; the plain average first."""
    if not trial["chosen"]:
        return "", 1.0, "plain average"
    rule, length = trial["rules"][trial["chosen"]], float(trial["lengths"][trial["chosen"]])
    return rule, length, chosen_step(trial).replace(" at ", " × ").removesuffix(" times its length")
