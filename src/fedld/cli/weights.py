"""`fedld weights`: which public weights fit, and what a file holds."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedld.errors import FedLDError, unknown_name
from fedld.records.writer import dump


def weights(
    file: Annotated[Path | None, typer.Argument(help=".safetensors or weights-only .pth file")] = None,
    model: Annotated[str | None, typer.Option(help="network that it should fit; default: any")] = None,
    json: Annotated[bool, typer.Option("--json", help="print as JSON")] = False,
) -> None:
    """List the public weights that fit our networks, or check a file and say what of it loads."""
    if file is None:
        _list(json)
        return
    fit = check_file(file, model)
    if json:
        typer.echo(dump(fit))
        return
    typer.echo(f"{file} fits {fit['model']}: {fit['report']}")
    typer.echo(f"try: fedld run --model {fit['model']} --weights {file} --train head")


def _list(json: bool) -> None:
    from fedld.models.files import KNOWN

    if json:
        typer.echo(dump(KNOWN))
        return
    typer.echo("These public files fit, as .safetensors or weights-only .pth:")
    for name, files in KNOWN.items():
        typer.echo(f"  {name:14}{files}")
    typer.echo("So do the files model.safetensors of our own runs. A head of other classes starts anew.")


def check_file(file: Path, model: str | None = None) -> dict[str, Any]:
    """Find the network that a file fits, and what of it loads."""
    from fedld.models import NAMES
    from fedld.models.build import outline
    from fedld.models.files import match_weights, read_weights

    state = read_weights(file)
    names = [model] if model else list(NAMES)
    problems = []
    for name in names:
        if name not in NAMES:
            raise unknown_name("model", name, NAMES)
        classes = _classes(state, outline(name, 2, 64).head.weight.shape[1])
        try:
            _, report = match_weights(outline(name, classes, 64), state, file)
        except FedLDError as error:
            problems.append(str(error))
            continue
        result = {
            key: list(getattr(report, key)) for key in ("loaded", "missing", "unexpected", "mismatched")
        }
        return {"file": str(file), "model": name, "report": str(report), **result}
    raise FedLDError(problems[0] if model else f"weights file '{file}' fits none of {', '.join(NAMES)}")


def _classes(state: dict[str, Any], features: int) -> int:
    """Count the outputs of the file's own head, if it has one that takes so many features."""
    heads = [value for name, value in state.items() if value.ndim == 2 and value.shape[1] == features]
    return max(2, len(heads[-1])) if heads else 2
