"""The command line: one file a command. Bad input is one sentence on standard error and exit code 2."""

import sys
import traceback

import click
import typer

from fedld import __version__
from fedld.cli.auto import auto
from fedld.cli.card import card
from fedld.cli.compare import compare
from fedld.cli.data import data
from fedld.cli.diagnose import diagnose
from fedld.cli.ledger import ledger
from fedld.cli.methods import methods
from fedld.cli.predict import predict
from fedld.cli.presets import presets
from fedld.cli.report import export, report, watch
from fedld.cli.reproduce import reproduce
from fedld.cli.run import run
from fedld.cli.site import server, site
from fedld.cli.tune import tune
from fedld.cli.weights import weights
from fedld.config.experiment import SYNONYMS
from fedld.errors import FedLDError, Interrupted

INTERRUPTED = 130
app = typer.Typer(
    help="Federated learning on heterogeneous data: explain, train, prove, scale.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (
    run,
    compare,
    auto,
    methods,
    presets,
    data,
    weights,
    diagnose,
    tune,
    predict,
    card,
    report,
    watch,
    export,
):
    app.command()(command)
app.add_typer(reproduce, name="reproduce")
app.add_typer(site, name="site")
app.add_typer(server, name="server")
app.add_typer(ledger, name="ledger")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"fedld {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True),
    debug: bool = typer.Option(False, "--debug", help="show where an error came from"),
) -> None:
    """Federated learning on heterogeneous data: explain, train, prove, scale."""


def start() -> None:
    """Run the command that was asked for; Ctrl-C without a word of its own leaves as KeyboardInterrupt."""
    try:
        code = app(standalone_mode=False)  # of a command that said `raise typer.Exit(code)`
    except Interrupted as stop:
        typer.echo(str(stop), err=True)
        sys.exit(INTERRUPTED)
    except FedLDError as error:
        if "--debug" in sys.argv[1:2]:
            traceback.print_exception(error)
        typer.echo(f"fedld: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        typer.echo(f"fedld: {error.filename or 'the system'}: {error.strerror or error}", err=True)
        sys.exit(2)
    except MemoryError:
        typer.echo("fedld: there is not enough memory for this", err=True)
        sys.exit(2)
    except click.exceptions.Abort:  # Ctrl-C at a prompt
        raise KeyboardInterrupt from None
    except click.NoSuchOption as error:
        meant = SYNONYMS.get(error.option_name.lstrip("-").replace("-", "_"))
        if meant is None:
            error.show()
        else:
            option = "--" + meant.replace("_", "-")
            typer.echo(f"fedld: there is no option '{error.option_name}': did you mean '{option}'?", err=True)
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    if code == INTERRUPTED:  # what typer makes of Ctrl-C, without a word
        raise KeyboardInterrupt
    sys.exit(code)
