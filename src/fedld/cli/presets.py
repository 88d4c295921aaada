"""`fedld presets`: settings of the paper's experiments."""

from typing import Annotated, Any

import typer


def presets(
    json: Annotated[bool, typer.Option("--json", help="print all settings as JSON")] = False,
) -> None:
    """List the presets: the paper's experiments, each as published and at a small scale."""
    from fedld.config.presets import names, read_preset
    from fedld.records.writer import dump

    found: dict[str, dict[str, Any]] = {name: read_preset(name) for name in names()}
    if json:
        typer.echo(dump(found))
        return
    width = max(map(len, found))
    for name, settings in found.items():
        facts = [f"{settings[key]}" for key in ("dataset", "model")]
        facts += [f"{settings['rounds']} rounds", f"lr {settings['lr']}"]
        facts += [f"split {settings['split']}"] if "split" in settings else []
        facts += [f"alpha {settings['alpha']}"] if "alpha" in settings else []
        typer.echo(f"{name:{width}}  {', '.join(facts)}")
    typer.echo("use one: fedld run --preset NAME, with further options after it")
