"""`fedld ledger`: is the record whole, and what does it say?"""

from pathlib import Path
from typing import Annotated

import typer

from fedld.errors import FedLDError
from fedld.records.ledger import Ledger, entry_lines

ledger = typer.Typer(help="Verify and show the ledger of a server or a site.", no_args_is_help=True)
File = Annotated[Path, typer.Argument(help="ledger.jsonl, or the folder that has it")]


def _ledger(path: Path) -> Ledger:
    return Ledger(path / "ledger.jsonl" if path.is_dir() else path)


@ledger.command()
def verify(
    path: File,
    head: Annotated[str | None, typer.Option(help="a hash noted earlier, or from a model file")] = None,
) -> None:
    """Recompute every hash; a changed line is named, and the exit code is 2."""
    check = _ledger(path).check()
    if check.problem:
        raise FedLDError(f"'{path}': {check.problem}; the {len(check.entries)} lines before it are whole")
    if head is not None and head not in {entry["hash"] for entry in check.entries}:
        raise FedLDError(f"'{path}' has no line with the hash {head}: lines are missing at its end")
    if check.torn:
        typer.echo(f"an unfinished line of {check.torn} bytes is at the end: a crash, or a changed end")
    typer.echo(f"{len(check.entries)} lines are whole; head {check.head}")


@ledger.command()
def show(
    path: File, last: Annotated[int | None, typer.Option(help="only so many lines, the newest")] = None
) -> None:
    """Print the ledger's lines."""
    entries = _ledger(path).check().entries
    for line in entry_lines(entries if last is None else entries[-last:] if last else []):
        typer.echo(line)
