"""Settings as people, scripts and enemies write them: good ones with some values replaced by bad ones."""

import random
from collections.abc import Callable
from pathlib import Path

from fedld.aggregation.rule import RULES
from fedld.config.experiment import SETTINGS, make_experiment, override, parse_toml, read_toml
from fedld.config.resolve import OBJECTIVES
from fedld.engine.setup import prepare
from fedld.methods import METHODS
from fedld.registry import options_of

GOOD = [
    *("rounds=2", "clients=3", "dataset=digits", "partition=iid", "partition=quantity", "model=cnn"),
    *("lr=0.1", "seed=7", "alpha=0.1", "min_size=1", "workers=0", "batch_size=8", "buffers=local"),
]
ODD = [
    *(
        "nan",
        "-nan",
        "inf",
        "-inf",
        "0",
        "-1",
        "0.0",
        "-0.0",
        "1e400",
        "1e-320",
        "true",
        "false",
        "''",
        "[]",
        "{}",
    ),
    *(
        "9" * 5000,
        "-" + "9" * 30,
        "9223372036854775808",
        "0x7fffffff",
        "1_000_000_000",
        "2147483648",
        "65536",
    ),
    *(
        "[" * 500 + "]" * 500,
        "{name='x'}",
        "{name=3}",
        "[1,[2,[3]]]",
        "'\\u0000'",
        '"a\\u0000b"',
        "'é'",
        '"\\ud7ff"',
    ),
    *(
        "1979-05-27",
        "07:32:00",
        "'" + "x" * 400 + "'",
        "'~nobody-at-all/..'",
        "'../../x'",
        "'/proc'",
        "'/dev/zero'",
    ),
    *(
        "'None'",
        "null",
        "'fedavg'",
        "'; rm -rf /'",
        "'%s%n'",
        "'[bold]'",
        "3.0",
        "'3'",
        "0.5",
        "1",
        "2",
        "1000",
    ),
]
DATASETS = [
    *(
        "npz:/dev/zero",
        "npz:",
        "folder:",
        "folder:/proc",
        "folder:~nobody-at-all/..",
        "npz:" + "y" * 300,
        "retina",
    ),
    *(
        "folder:/dev/null",
        "npz:/proc/self/mem",
        "npz:\\u0000",
        "covid-fl",
        "digits:",
        ":",
        "folder:/root/../etc",
    ),
    *("npz:/etc/passwd", "digits", "digits", "fundus-sim", "column:x"),
]
PARTITIONS = [
    "iid",
    "dirichlet",
    "dirichlet-raw",
    "quantity",
    "classes",
    "site",
    "column:",
    "column:x",
    "dirichlet-sslfl",
]


def _assignment(rng: random.Random) -> str:
    kind = rng.randrange(8)
    if kind == 0:
        name = rng.choice(sorted(METHODS))
        options = [*options_of(METHODS[name]), "x", "", "name", "rule", "objective"]
        return f"method={{name='{name}', {rng.choice(options) or 'x'}={rng.choice(ODD)}}}"
    if kind == 1:
        name = rng.choice(sorted(OBJECTIVES))
        options = [*options_of(OBJECTIVES[name]), "lam"]
        return f"objective={{name='{name}', {rng.choice(options)}={rng.choice(ODD)}}}"
    if kind == 2:
        name = rng.choice(sorted(RULES))
        fields = [*getattr(RULES[name], "__dataclass_fields__", {}), "components", "granularity"]
        return f"rule={{name='{name}', {rng.choice(fields)}={rng.choice(ODD)}}}"
    if kind == 3:
        return f'dataset="{rng.choice(DATASETS)}"'
    if kind == 4:
        return f"partition='{rng.choice(PARTITIONS)}'"
    if kind == 5:
        inner = rng.choice(["x", "samples", "test_fraction", "name", "mu", "lam", "a.b", "feature_shift"])
        return f"{rng.choice(['data', 'method', 'rule', 'objective', *SETTINGS])}.{inner}={rng.choice(ODD)}"
    return f"{rng.choice([*SETTINGS, 'unknown', 'é', ''])}={rng.choice(ODD)}"


def make_case(rng: random.Random, folder: Path) -> Callable[[], object]:
    """A handful of assignments, given on the command line or as a file."""
    chosen = [*rng.sample(GOOD, 3), *(_assignment(rng) for _ in range(rng.choice([1, 1, 2, 4])))]
    as_file = rng.random() < 0.3
    if as_file:
        (folder / "config.toml").write_text("\n".join(chosen), encoding="utf-8", errors="replace")
    base = {"dataset": "digits", "rounds": 1, "workers": 0}

    def run() -> object:
        settings = base | read_toml(folder / "config.toml") if as_file else override(base, chosen)
        experiment = make_experiment(settings)
        prepare(experiment, folder / "states")
        return parse_toml(experiment.to_toml())

    return run
