"""`fedld site` and `fedld server`: what a hospital's engineer and the consortium's operator type."""

from pathlib import Path
from typing import Annotated

import typer

from fedld.config.experiment import make_experiment, read_toml
from fedld.errors import FedLDError

site = typer.Typer(help="Take part in a federation as a site.", no_args_is_help=True)
server = typer.Typer(help="Run the server of a federation.", no_args_is_help=True)

Data = Annotated[Path, typer.Option(help="npz file, CSV or parquet table, or folder of pictures")]
Authority = Annotated[Path | None, typer.Option(help="certificate of the authority (PEM)")]
Insecure = Annotated[bool, typer.Option("--insecure", help="no encryption, no keys; on this machine only")]
Runs = Annotated[Path, typer.Option(help="folder under which the server's runs are written")]
State = Annotated[Path, typer.Option(help="where this site keeps its own state")]
Bits = Annotated[int, typer.Option(help="bits that 16-bit image files really use, where they do not say")]
Patient = Annotated[
    str, typer.Option(help="pattern with a group that is the patient in a file name: '^([^_]+)_'")
]
PolicyFile = Annotated[Path | None, typer.Option(help="this site's own policy.toml: what it takes part in")]
PeersFile = Annotated[Path | None, typer.Option(help="the consortium's peers.toml: keys for secure rounds")]
TaskName = Annotated[str, typer.Option(help="task that this site's data is for")]
TargetColumn = Annotated[str, typer.Option(help="column of a table that is learned; of survival TIME,EVENT")]
SplitColumn = Annotated[str, typer.Option(help="column of a table: train or test")]
Drop = Annotated[str, typer.Option(help="columns of a table that are never used, with commas between")]
Name = Annotated[str, typer.Option(help="the site's name in the consortium")]


@site.command()
def check(
    data: Data,
    config: Annotated[Path | None, typer.Option(help="the consortium's experiment.toml")] = None,
    classes: Annotated[str | None, typer.Option(help="its class names, with commas between")] = None,
    sheet: Annotated[Path | None, typer.Option(help="write a picture of some images of each class")] = None,
    bits: Bits = 0,
    patient: Patient = "",
    task: TaskName = "classification",
    target_column: TargetColumn = "",
    split_column: SplitColumn = "",
    drop: Drop = "",
    policy: PolicyFile = None,
    peers: PeersFile = None,
) -> None:
    """Tell whether this site's data fits the experiment, and what would leave the site."""
    from fedld.engine.backends.flower.check import check_site
    from fedld.engine.backends.flower.federation import FileFacts

    experiment = make_experiment(read_toml(config)) if config else None
    files = FileFacts(
        bits=bits,
        patient=patient,
        task=task,
        target_column=target_column,
        split_column=split_column,
        drop=drop,
    )
    report = check_site(data, experiment, classes.split(",") if classes else None, files)
    for line in report.lines():
        typer.echo(line)
    if policy is not None:
        from fedld.privacy.policy import read_policy

        for line in read_policy(policy).lines():
            typer.echo(line)
    if peers is not None:
        from fedld.privacy.context import read_peers
        from fedld.privacy.peers import peers_lines

        for line in peers_lines(read_peers(peers)):
            typer.echo(line)
    if sheet is not None:
        from fedld.study.pictures import contact_sheet

        contact_sheet(report.table, sheet)
    if report.problems:
        raise FedLDError(f"this data does not fit: {report.problems[0]}")


@site.command("start")
def start_site(
    name: Name,
    data: Data,
    superlink: Annotated[str, typer.Option(help="the server, HOST:PORT")],
    state: State = Path("fedld-state"),
    ca: Authority = None,
    key: Annotated[Path | None, typer.Option(help="this site's private key")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:NUMBER or mps")] = "cpu",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="leave unreadable files out")] = False,
    bits: Bits = 0,
    patient: Patient = "",
    task: TaskName = "classification",
    target_column: TargetColumn = "",
    split_column: SplitColumn = "",
    drop: Drop = "",
    weights: Annotated[Path | None, typer.Option(help="file of the frozen trunk, as the server's")] = None,
    min_images: Annotated[int, typer.Option(help="least images of any measurement and class in it")] = 50,
    min_batch: Annotated[int, typer.Option(help="least images of a training step")] = 8,
    max_image_size: Annotated[int, typer.Option(help="most pixels along a side of an image")] = 1024,
    max_epochs: Annotated[int, typer.Option(help="most epochs per round")] = 100,
    max_rounds: Annotated[int, typer.Option(help="most rounds of a run")] = 1000,
    max_runs: Annotated[int, typer.Option(help="most runs begun within a day")] = 100,
    max_models: Annotated[int, typer.Option(help="most models of other sites measured in a round")] = 64,
    max_measurements: Annotated[int, typer.Option(help="most models measured in a run")] = 5000,
    cache_gb: Annotated[float, typer.Option(help="most gigabytes of decoded images on disk")] = 50.0,
    memory_gb: Annotated[float, typer.Option(help="most gigabytes of memory; 0: what is free")] = 0.0,
    images_per_feature: Annotated[
        float, typer.Option(help="least images for each feature with second moments that leave")
    ] = 0.1,
    policy: PolicyFile = None,
    peers: PeersFile = None,
    peer_key: Annotated[
        Path | None, typer.Option(help="this site's key for secure rounds; default: NAME.peer.key by --key")
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Join a federation and stay until stopped: a Flower SuperNode that runs fedld and nothing else."""
    from fedld.deployment.launch import Node
    from fedld.engine.backends.flower.federation import FileFacts, open_site, training_rows
    from fedld.engine.backends.flower.limits import Limits

    if weights is not None:
        from fedld.models.files import read_weights

        read_weights(weights)
    limits = Limits(
        min_images=min_images,
        min_batch=min_batch,
        max_image_size=max_image_size,
        max_epochs=max_epochs,
        max_rounds=max_rounds,
        max_runs=max_runs,
        max_models=max_models,
        max_measurements=max_measurements,
        cache_gb=cache_gb,
        memory_gb=memory_gb,
        images_per_feature=images_per_feature,
    )
    files = FileFacts(
        skip_bad=skip_bad,
        bits=bits,
        patient=patient,
        task=task,
        target_column=target_column,
        split_column=split_column,
        drop=drop,
    )
    limits.check_data(len(training_rows(open_site(str(data), None, files))))
    node = Node(
        site=name,
        data=data,
        superlink=superlink,
        state=state,
        ca=ca,
        key=key,
        device=device,
        files=files,
        insecure=insecure,
        weights=weights,
        limits=limits,
        policy=policy,
        peers=peers,
        peer_key=peer_key,
    )
    if code := node.start():
        raise FedLDError(f"the SuperNode of '{name}' ended with code {code}, see above")
    typer.echo(f"site '{name}' stopped")


@site.command("status")
def site_status(name: Name, state: State = Path("fedld-state")) -> None:
    """Show the running site: its server, and what it did last."""
    from fedld.deployment import control

    for line in control.site_status(state / name):
        typer.echo(line)


@site.command("stop")
def stop_site(name: Name, state: State = Path("fedld-state")) -> None:
    """End the running site; its state stays."""
    from fedld.deployment import control

    control.stop(state / name)
    typer.echo(f"site '{name}' stopped")


@site.command("key")
def site_key(name: Name, out: Annotated[Path, typer.Option(help="folder")] = Path()) -> None:
    """Make this site's key pair: NAME.key stays here, NAME.pub goes to the server's operator."""
    from fedld.deployment.keys import make_site_key

    make_site_key(name, out)
    typer.echo(f"keep {out / name}.key, send {out / name}.pub to the server's operator")


@site.command("peer-key")
def site_peer_key(name: Name, out: Annotated[Path, typer.Option(help="folder")] = Path()) -> None:
    """Make this site's key for secure rounds: NAME.peer.key stays, NAME.peer.toml goes to the other sites."""
    from fedld.deployment.keys import make_peer_key

    make_peer_key(name, out)
    typer.echo(f"keep {out / name}.peer.key, send {out / name}.peer.toml to the consortium")


@site.command("peers")
def assemble_peers(
    files: Annotated[list[Path], typer.Argument(help="every site's NAME.peer.toml")],
    out: Annotated[Path, typer.Option(help="the file to write")] = Path("peers.toml"),
) -> None:
    """Assemble the consortium's peers.toml, and print the fingerprint that all sites compare."""
    from fedld.privacy.peers import merged_peers, peers_lines, peers_text
    from fedld.records.writer import write_atomically

    merged = merged_peers(files)
    write_atomically(out, peers_text(merged).encode())
    for line in peers_lines(merged):
        typer.echo(line)


@site.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder")] = Path("demo"),
    dataset: Annotated[str, typer.Option(help="any dataset that fedld can divide")] = "fundus-sim",
    clients: Annotated[int, typer.Option(help="number of sites")] = 3,
) -> None:
    """Write a simulated federation as one npz file a site and one with the server's test set."""
    from fedld.data import DataSpec, load
    from fedld.engine.backends.flower.simulation import export

    for name, count in export(load(DataSpec(dataset=dataset, clients=clients)), out).items():
        typer.echo(f"{out / name}.npz: {count} images{'' if name == 'test' else ' to train on'}")


@server.command("start")
def start_server(
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on")] = 8000,
    runs: Runs = Path("runs"),
    ca: Authority = None,
    certificate: Annotated[Path | None, typer.Option(help="this server's certificate (PEM)")] = None,
    key: Annotated[Path | None, typer.Option(help="this server's private key (PEM)")] = None,
    database: Annotated[Path | None, typer.Option(help="registered sites; default: in --runs")] = None,
    insecure: Insecure = False,
    disk_gb: Annotated[float, typer.Option(help="room for replies that are not read yet", min=0)] = 50.0,
) -> None:
    """Wait for sites and experiments until stopped: a Flower SuperLink that runs fedld and nothing else."""
    from fedld.deployment.launch import FlowerServer

    if code := FlowerServer(
        host=host,
        port=port,
        runs=runs,
        ca=ca,
        certificate=certificate,
        key=key,
        database=database,
        insecure=insecure,
        disk_gb=disk_gb,
    ).start():
        raise FedLDError(f"the SuperLink ended with code {code}, see above")
    typer.echo("server stopped")


@server.command()
def register(
    name: Name,
    key: Annotated[Path, typer.Option(help="the site's public key, NAME.pub")],
    runs: Runs = Path("runs"),
) -> None:
    """Let a site in: its name and key are written to RUNS/sites.toml, which the server obeys at once."""
    from fedld.deployment.launch import private_folder, registrations_file
    from fedld.deployment.registrations import Registrations

    private_folder(runs)
    Registrations(registrations_file(runs)).add(name, key)
    typer.echo(f"site '{name}' is registered")


@server.command()
def unregister(name: Name, runs: Runs = Path("runs")) -> None:
    """Let a site in no longer."""
    from fedld.deployment.launch import registrations_file
    from fedld.deployment.registrations import Registrations

    Registrations(registrations_file(runs)).remove(name)
    typer.echo(f"site '{name}' is no longer registered")


@server.command("status")
def server_status(runs: Runs = Path("runs")) -> None:
    """Show the running server: its sites, connected since when and last seen, and its runs."""
    from fedld.deployment import control

    for line in control.server_status(runs):
        typer.echo(line)


@server.command("stop")
def stop_server(runs: Runs = Path("runs")) -> None:
    """End the running server; runs keep their last finished round."""
    from fedld.deployment import control

    control.stop(runs)
    typer.echo("server stopped")


@server.command()
def certificates(
    host: Annotated[
        list[str] | None, typer.Option(help="name or address of the server; may be repeated")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder")] = Path("certificates"),
    renew: Annotated[bool, typer.Option("--renew", help="a new server.crt and server.key only")] = False,
    ca_key: Annotated[
        Path | None, typer.Option(help="the authority's key, to renew; default: in --out")
    ] = None,
) -> None:
    """Make or renew the server's certificate, and the authority's that sites need to recognise it."""
    from fedld.deployment.keys import make_certificates, renew_certificate

    if renew:
        until = renew_certificate(host or [], out, ca_key)
        typer.echo(
            f"{out}/server.crt and server.key are new, until {until:%Y-%m-%d}; sites keep their ca.crt"
        )
        return
    if ca_key is not None:
        raise FedLDError("--ca-key is for --renew: a new authority makes its own key")
    make_certificates(host or [], out)
    typer.echo(f"server: {out}/server.crt and server.key (secret); sites: {out}/ca.crt")
    typer.echo(f"{out}/ca.key signs renewals: keep it secret, on another machine than the server's")
