"""The experiment's settings as command-line options, written down once for all commands."""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from fedld.engine.experiment import override, read_toml
from fedld.study.compare import of_one_method
from fedld.study.presets import read_preset

OPTIONS: dict[str, tuple[type, str]] = {
    "method": (str, "federated method, see 'fedld methods'"),
    "objective": (str, "what clients minimise: cross-entropy, marg-log, ..."),
    "rule": (str, "how the server combines: mean, principal, consensus, ..."),
    "dataset": (str, "fundus-sim, digits, npz:PATH, folder:PATH, retina, covid-fl"),
    "data_root": (Path, "folder of a published dataset"),
    "split": (int, "published split of that dataset"),
    "clients": (int, "number of clients"),
    "partition": (str, "iid, dirichlet, dirichlet-sslfl, site, quantity, classes"),
    "alpha": (float, "Dirichlet concentration: small is heterogeneous"),
    "image_size": (int, "side of the images in pixels"),
    "model": (str, "cnn, vgg9, resnet8, resnet8-gn, resnet18, resnet50, mobilenet_v2"),
    "weights": (Path, "initial weights, .safetensors or weights-only .pth"),
    "rounds": (int, "communication rounds"),
    "local_epochs": (int, "epochs a client trains in a round"),
    "batch_size": (int, "samples a step"),
    "lr": (float, "learning rate of the clients"),
    "momentum": (float, "momentum of the clients"),
    "weight_decay": (float, "weight decay of the clients"),
    "buffers": (str, "BatchNorm statistics: global, local or frozen"),
    "sample_rate": (float, "share of clients that take part in a round"),
    "decompose": (int, "loss decomposition every N rounds, 0 = never"),
    "decompose_samples": (int, "estimate the decomposition on at most N samples a client"),
    "workers": (int, "worker processes, 0 = in this process; default: cores"),
    "dtype": (str, "float32 or bfloat16"),
    "device": (str, "cpu or cuda"),
    "on_client_failure": (str, "retry, skip or stop"),
    "min_clients": (int, "fewer usable replies than this end the run"),
    "round_timeout": (float, "seconds a round may take"),
    "wait_for_clients": (float, "seconds to wait for sites, at the start and below quorum (Flower)"),
    "checkpoint_every": (int, "rounds between checkpoints"),
}


def with_settings(*without: str, many: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the experiment's options; it receives them merged as `settings`.

    Later wins: `--preset NAME`, `--config FILE`, then single options, then `--set key=value`. A command of
    `many` methods also receives the tables that are for one of them alone.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        names = [name for name in OPTIONS if name not in without]

        @wraps(command)
        def wrapper(**given: Any) -> None:
            preset, config, sets = given.pop("preset"), given.pop("config"), given.pop("set_")
            settings = (read_preset(preset) if preset else {}) | (read_toml(config) if config else {})
            if not many:
                settings = of_one_method(settings, given.get("method"))
            for name in names:
                if (value := given.pop(name)) is not None:
                    settings[name] = value
            command(settings=override(settings, sets or []), **given)

        own = [p for p in inspect.signature(command).parameters.values() if p.name != "settings"]
        wrapper.__signature__ = inspect.Signature([*own, *_config(), *map(_option, names)])  # type: ignore[attr-defined]
        return wrapper

    return decorate


def _option(name: str) -> inspect.Parameter:
    kind, text = OPTIONS[name]
    annotation = Annotated[kind | None, typer.Option(help=text, rich_help_panel="Experiment")]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _config() -> list[inspect.Parameter]:
    preset = Annotated[str | None, typer.Option(help="settings of the paper, e.g. retina-split1-small")]
    config = Annotated[Path | None, typer.Option(help="settings from a TOML file")]
    sets = Annotated[
        list[str] | None, typer.Option("--set", help="any setting: key=value or table.key=value")
    ]
    return [
        inspect.Parameter("preset", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=preset),
        inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=config),
        inspect.Parameter("set_", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=sets),
    ]
