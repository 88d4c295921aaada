"""`fedld presets`: settings of the paper's experiments, and of fine-tuning."""

from typing import Annotated, Any

import typer


def presets(
    json: Annotated[bool, typer.Option("--json", help="print all settings as JSON")] = False,
) -> None:
    """List the presets: the paper's experiments, as published and at a small scale, and fine-tuning."""
    from fedld.config.presets import names, read_preset
    from fedld.records.writer import dump

    presets_by_name: dict[str, dict[str, Any]] = {name: read_preset(name) for name in names()}
    if json:
        typer.echo(dump(presets_by_name))
        return
    width = max(map(len, presets_by_name))
    for name, settings in presets_by_name.items():
        cells = [f"{settings[key]}" for key in ("dataset", "model") if key in settings]
        cells += [f"{settings['rounds']} rounds", f"lr {settings['lr']}"]
        cells += [f"{settings['train']} from a {settings['start']} start"] if "start" in settings else []
        cells += [f"split {settings['split']}"] if "split" in settings else []
        cells += [f"alpha {settings['alpha']}"] if "alpha" in settings else []
        typer.echo(f"{name:{width}}  {', '.join(cells)}")
    typer.echo("use one: fedld run --preset NAME, with further options after it")
