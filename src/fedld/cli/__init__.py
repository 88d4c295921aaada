"""The command line: one file a command. Bad input is one sentence on standard error and exit code 2."""

import sys

import click
import typer

from fedld import __version__
from fedld.cli.compare import compare
from fedld.cli.data import data
from fedld.cli.diagnose import diagnose
from fedld.cli.methods import methods
from fedld.cli.report import export, report, watch
from fedld.cli.reproduce import reproduce
from fedld.cli.run import run
from fedld.cli.site import server, site
from fedld.cli.tune import tune
from fedld.engine.loop import Interrupted
from fedld.errors import FedLDError

app = typer.Typer(
    help="Federated learning on heterogeneous data: explain, train, prove, scale.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (run, compare, methods, data, diagnose, tune, report, watch, export):
    app.command()(command)
app.add_typer(reproduce, name="reproduce")
app.add_typer(site, name="site")
app.add_typer(server, name="server")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"fedld {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True)) -> None:
    """Federated learning on heterogeneous data: explain, train, prove, scale."""


def start() -> None:
    """Run the command that was asked for."""
    try:
        app(standalone_mode=False)
    except Interrupted as stop:
        typer.echo(str(stop), err=True)
        sys.exit(130)
    except FedLDError as error:
        typer.echo(f"fedld: {error}", err=True)
        sys.exit(2)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
