"""Run directories made of numbers with known structure, in the engine's format."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedld.records.schema import FILES, RecordFile
from fedld.tasks.scores import MEASURES

GAIN = {"fedavg": 0.0, "fedprox": 0.003, "fedld": 0.02}


def write_lines(folder: Path, file: RecordFile, lines: list[dict]) -> None:
    """Only what the engine writes too: a field that is not in the schema is refused."""
    for line in lines:
        assert line.keys() <= file.line.__annotations__.keys()
    (folder / file.name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def terms(method: str, t: int, rounds: int, noise: float) -> dict[str, float]:
    """Signed terms that add up; fedld's shift is smaller."""
    local = 0.25 + 0.45 * np.exp(-4 * t / rounds) + noise
    shift = (0.30 if method != "fedld" else 0.18) + 0.1 * np.exp(-3 * t / rounds)
    aggregation = -0.06 - 0.05 * t / rounds
    return {
        "local_loss": local,
        "shift_loss": shift,
        "aggregation_loss": aggregation,
        "global_loss": local + shift + aggregation,
        "identity_error": 0.0,
    }


def _make_run(path: Path, method: str = "fedavg", seed: int = 0, **options) -> Path:
    """A finished run with every record the engine writes."""
    clients, rounds = options.get("clients", 5), options.get("rounds", 8)
    names = options.get("names") or [f"site {i + 1}" for i in range(clients)]
    classes, dataset = options.get("classes", 2), options.get("dataset", "fundus-sim")
    random = np.random.default_rng([seed, sum(map(ord, method))])
    path.mkdir(parents=True)
    (path / "config.toml").write_text(
        f'dataset = "{dataset}"\nclients = {clients}\npartition = "dirichlet"\nalpha = 0.5\nmodel = "cnn"\n'
        f'rounds = {rounds}\nlr = 0.05\nseed = {seed}\n\n[method]\nname = "{method}"\n'
    )
    sizes = np.random.default_rng(seed).integers(60, 400, clients)
    counts = [
        np.random.default_rng([seed, i]).multinomial(n, np.random.default_rng([i]).dirichlet([0.6] * classes))
        for i, n in enumerate(sizes)
    ]
    lines, client_lines, conflict, cross = [], [], [], []
    shared = 0.01 * np.random.default_rng(seed).normal()
    for t in range(1, rounds + 1):
        accuracy = 0.86 - 0.36 * np.exp(-3.5 * t / rounds) + GAIN.get(method, 0.01) + shared
        accuracy += 0.004 * random.normal()
        line = {
            "round": t,
            "clients": clients,
            "update_norm": 0.3,
            "norm_ratio": 0.8 + 0.1 * random.normal(),
            "cosine_to_average": 0.9,
            "bytes_up": 4_000_000,
            "buffer_disagreement": None,
            "bytes_down": 4_000_000,
            "test": {
                "count": 500,
                "accuracy": accuracy,
                "balanced_accuracy": accuracy - 0.01,
                "auroc": accuracy + 0.06,
                "loss": 1.2 - accuracy,
                "ece": 0.05,
            },
            "seconds": 1.5,
            **terms(method, t, rounds, 0.004 * random.normal()),
        }
        lines.append(line)
        for i in range(clients):
            client_lines.append(
                {
                    "round": t,
                    "client": names[i],
                    "index": i,
                    "size": int(sizes[i]),
                    "label_counts": counts[i].tolist(),
                    "before": {
                        "loss": 0.6,
                        "accuracy": float(np.clip(accuracy - 0.1 + 0.04 * i / clients * 5, 0, 1)),
                    },
                    "after": {"loss": 0.4, "accuracy": min(1.0, accuracy + 0.05)},
                    "steps": 4.0,
                    "train_loss": 0.5,
                    "seconds": 0.2,
                    "update_norm": 0.2,
                    "cosine_to_aggregate": 0.7,
                }
            )
        updates = random.normal(size=(clients, 24)) + np.where(np.arange(clients) % 3, 1, -1)[:, None]
        gram = updates @ updates.T
        values = np.linalg.eigvalsh(gram)[::-1]
        kept = max(1, int(0.8 * clients))
        conflict.append(
            {
                "round": t,
                "sampled": list(range(clients)),
                "clients": names,
                "weights": (sizes / sizes.sum()).tolist(),
                "rejected": {},
                "norms": np.sqrt(np.diagonal(gram)).tolist(),
                "eigenvalues": values.tolist(),
                "kept": kept,
                "kept_energy": 0.9,
                "cosines": [0.7] * clients,
                "norm_ratio": line["norm_ratio"],
                "cosine": 0.9,
                "coefficients": {},
                "eigen_gap": 0.1,
                "sign_margin": 0.1,
                "weight_for": [0.8] * kept,
                "weight_against": [0.2] * kept,
                "votes_for": [clients - k % (clients // 2 + 1) for k in range(kept)],
                "votes_against": [k % (clients // 2 + 1) for k in range(kept)],
                "gram": gram.tolist(),
            }
        )
        matrix = 0.4 + 0.5 * random.random((clients, clients))
        np.fill_diagonal(matrix, 0.2)
        cross.append(
            {
                "round": t,
                "clients": names,
                "sampled": list(range(clients)),
                "sizes": sizes.tolist(),
                "cross_loss": matrix.tolist(),
                "global_losses": matrix.mean(1).tolist(),
                "standard_errors": None,
            }
        )
    for file, content in zip(FILES, (lines, client_lines, conflict, cross), strict=True):
        write_lines(path, file, content)
    confusion = (np.eye(classes) * 400 + random.integers(20, 90, (classes, classes))).astype(int)
    confidence = np.linspace(0.5, 0.98, 10)
    predictions = {
        "confusion": confusion.tolist(),
        "calibration": {
            "confidence": confidence.tolist(),
            "accuracy": (confidence - 0.05).tolist(),
            "count": [50] * 10,
            "ece": 0.05,
        },
        "classes": ["healthy", "disease", *(f"class {k}" for k in range(2, classes))][:classes],
    }
    (path / "predictions.json").write_text(json.dumps(predictions))
    facts = {"format": 2, "task": "classification", "measures": [one.to_json() for one in MEASURES]}
    (path / "run.json").write_text(json.dumps(facts))
    summary = {
        "format": 2,
        "test": {"final": lines[-1]["test"]},
        "rounds": rounds,
        "seconds": 1.5 * rounds,
        "seed": seed,
    }
    (path / "summary.json").write_text(json.dumps({**summary, "method": method, "dataset": dataset}))
    return path


def _make_study(
    path: Path, methods=("fedavg", "fedprox", "fedld"), seeds=(0, 1, 2), name="demo", **options
) -> Path:
    """A study directory, as `fedld compare` leaves it."""
    runs = []
    for seed in seeds:
        for method in methods:
            where = f"runs/{method}-seed{seed}"
            _make_run(path / where, method, seed, **options)
            runs.append({"label": method, "method": method, "seed": seed, "path": where})
    index = {"name": name, "command": "fedld compare --out demo", "baseline": "fedavg", "runs": runs}
    (path / "study.json").write_text(json.dumps(index))
    return path


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished study; tests must not change it."""
    return _make_study(tmp_path_factory.mktemp("study") / "demo")


@pytest.fixture
def make_run():
    return _make_run


@pytest.fixture
def make_study():
    return _make_study
