"""`fedld site` and `fedld server`: what a hospital's engineer and the consortium's operator type."""

from pathlib import Path
from typing import Annotated

import typer

from fedld.engine.experiment import make_experiment, read_toml
from fedld.errors import FedLDError

site = typer.Typer(help="Take part in a federation as a site.", no_args_is_help=True)
server = typer.Typer(help="Run the server of a federation.", no_args_is_help=True)

Data = Annotated[Path, typer.Option(help="npz file, or folder with a folder for every class")]
Authority = Annotated[Path | None, typer.Option(help="certificate of the authority (PEM)")]
Insecure = Annotated[bool, typer.Option("--insecure", help="no encryption, no keys; on this machine only")]
Name = Annotated[str, typer.Option(help="the site's name in the consortium")]


@site.command()
def check(
    data: Data,
    config: Annotated[Path | None, typer.Option(help="the consortium's experiment.toml")] = None,
    classes: Annotated[str | None, typer.Option(help="its class names, with commas between")] = None,
) -> None:
    """Tell whether this site's data fits the experiment, and what would leave the site."""
    from fedld.engine.flower.check import check_site

    experiment = make_experiment(read_toml(config)) if config else None
    report = check_site(data, experiment, classes.split(",") if classes else None)
    for line in report.lines():
        typer.echo(line)
    if report.problems:
        raise FedLDError(f"this data does not fit: {report.problems[0]}")


@site.command("start")
def start_site(
    name: Name,
    data: Data,
    superlink: Annotated[str, typer.Option(help="the server, HOST:PORT")],
    state: Annotated[Path, typer.Option(help="where this site keeps its own state")] = Path("fedld-state"),
    ca: Authority = None,
    key: Annotated[Path | None, typer.Option(help="this site's private key")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="leave unreadable files out")] = False,
    insecure: Insecure = False,
) -> None:
    """Join a federation and stay until stopped: a Flower SuperNode that runs fedld and nothing else."""
    from fedld.engine.flower.federation import open_site
    from fedld.engine.flower.launch import Node

    open_site(str(data), None, skip_bad=skip_bad)
    if code := Node(name, data, superlink, state, ca, key, device, skip_bad, insecure).start():
        raise FedLDError(
            f"the SuperNode ended with code {code}: is the key of '{name}' registered at the server?"
        )


@site.command("key")
def site_key(name: Name, out: Annotated[Path, typer.Option(help="folder")] = Path()) -> None:
    """Make this site's key pair: NAME.key stays here, NAME.pub goes to the server's operator."""
    from fedld.engine.flower.keys import make_site_key

    make_site_key(name, out)
    typer.echo(f"keep {out / name}.key, send {out / name}.pub to the server's operator")


@site.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder")] = Path("demo"),
    dataset: Annotated[str, typer.Option(help="any dataset that fedld can divide")] = "fundus-sim",
    clients: Annotated[int, typer.Option(help="number of sites")] = 3,
) -> None:
    """Write a simulated federation as one npz file a site and one with the server's test set."""
    from fedld.data import DataSpec, load
    from fedld.engine.flower.simulation import export

    for name, count in export(load(DataSpec(dataset, clients=clients)), out).items():
        typer.echo(f"{out / name}.npz: {count} images{'' if name == 'test' else ' to train on'}")


@server.command("start")
def start_server(
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on")] = 8000,
    runs: Annotated[Path, typer.Option(help="folder under which runs are written")] = Path("runs"),
    ca: Authority = None,
    certificate: Annotated[Path | None, typer.Option(help="this server's certificate (PEM)")] = None,
    key: Annotated[Path | None, typer.Option(help="this server's private key (PEM)")] = None,
    database: Annotated[Path | None, typer.Option(help="registered sites; default: in --runs")] = None,
    insecure: Insecure = False,
) -> None:
    """Wait for sites and experiments until stopped: a Flower SuperLink that runs fedld and nothing else."""
    from fedld.engine.flower.launch import Server

    if code := Server(host, port, runs, ca, certificate, key, database, insecure).start():
        raise FedLDError(f"the SuperLink ended with code {code}")


@server.command()
def certificates(
    host: Annotated[list[str], typer.Option(help="name or address of the server; may be repeated")],
    out: Annotated[Path, typer.Option(help="folder")] = Path("certificates"),
) -> None:
    """Make a certificate for the server, and the authority's that sites need to recognise it."""
    from fedld.engine.flower.keys import make_certificates

    make_certificates(host, out)
    typer.echo(f"server: {out}/server.crt and server.key (secret); sites: {out}/ca.crt")
