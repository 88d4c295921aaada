"""Progress bars: one a run, with accuracy, loss terms and the time left."""

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedld.records.schema import Event

console = Console(stderr=True)


class RunBars:
    """Shows the events of one or several runs."""

    def __init__(self, total: int, label: str) -> None:
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[facts]}"),
            console=console,
            transient=True,
        )
        self._label, self._total = label, total
        self._task: TaskID | None = None
        self._missing: dict[str, str] = {}
        self._notes: set[str] = set()

    def __enter__(self) -> "RunBars":
        self._bars.start()
        self._task = self._bars.add_task(self._label, total=self._total, facts="")
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, line: Event) -> None:
        """Take one event."""
        assert self._task is not None
        if line["event"] == "round":
            run = f"[dim]{line['run']}[/dim] " if "run" in line else ""
            self._bars.update(self._task, advance=1, facts=run + round_text(line))
            if not console.is_terminal:  # a log file, a batch system: bars would not be seen
                console.print(
                    f"{line.get('run', self._label)}  {round_text(line)}",
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )
            self._absence(line)
        elif line["event"] == "waiting":
            console.print(f"waiting for sites; here: {', '.join(line['sites']) or 'none'}")
        elif line["event"] == "note" and line["text"] not in self._notes:
            self._notes.add(line["text"])  # runs of a study have the same to say
            console.print(line["text"], soft_wrap=True)
        elif line["event"] == "failed":
            console.print(f"[bold red]{line['run']} failed: {escape(line['why'])}[/bold red]", soft_wrap=True)
        elif line["event"] == "dry_run":
            console.print(dry_run_text(line))
        elif line["event"] == "refused":
            console.print(f"site '{line['client']}' is refused: {escape(line['why'])}")

    def _absence(self, line: Event) -> None:
        """Say who is missing, in every round that changes it."""
        missing = line.get("missing", {})
        if "run" in line or missing == self._missing:
            return
        for name, reason in missing.items():
            if self._missing.get(name) != reason:
                console.print(f"[bold red]round {line['round']} is without '{name}': {reason}[/bold red]")
        for name in self._missing.keys() - missing.keys():
            console.print(f"round {line['round']}: '{name}' is back")
        self._missing = missing


def dry_run_text(line: Event) -> str:
    """Describe the result of a site's dry run before the first round."""
    if "why" in line:
        return f"[bold red]site '{line['client']}' cannot train: {escape(line['why'])}[/bold red]"
    return f"site '{line['client']}' is ready: {line['seconds']:.1f} s, {line['memory'] / 1e6:.0f} MB"


def round_text(line: Event) -> str:
    """Describe a round in a few words."""
    parts = [f"round {line['round']}"]
    test, personal = line.get("test") or {}, line.get("personal") or {}
    values = {name: test.get(name) for name in [*[name for name in test if name != "count"][:1], "loss"]}
    values |= {"personal": next((value for name, value in personal.items() if name != "count"), None)}
    values |= {"validation loss": (line.get("validation") or {}).get("loss")}
    values = {"test loss" if name == "loss" else name: value for name, value in values.items()}
    parts += [f"{name} {value:.3f}" for name, value in values.items() if value is not None]
    return "  ".join([*parts, *_terms(line)])


def _terms(line: Event) -> list[str]:
    """Describe the terms and their sum, the loss on the clients' training images (test images are apart)."""
    terms = {name: line.get(f"{name}_loss") for name in ("local", "shift", "aggregation")}
    measured = {name: value for name, value in terms.items() if value is not None}
    if len(measured) == len(terms) and line.get("global_loss") is not None:
        signed = f"{terms['shift']:+.3f} shift {terms['aggregation']:+.3f} aggregation"
        return [f"training loss {line['global_loss']:.3f} = {terms['local']:.3f} local {signed}"]
    return [f"{name} {value:.3f}" for name, value in measured.items()]
