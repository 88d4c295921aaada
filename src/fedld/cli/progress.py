"""Progress bars: one a run, with accuracy, loss terms and the time left."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedld.engine.records import Line

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

    def __enter__(self) -> "RunBars":
        self._bars.start()
        self._task = self._bars.add_task(self._label, total=self._total, facts="")
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, line: Line) -> None:
        """Take one event."""
        assert self._task is not None
        if line["event"] == "round":
            run = f"[dim]{line['run']}[/dim] " if "run" in line else ""
            self._bars.update(self._task, advance=1, facts=run + facts(line))
        elif line["event"] == "waiting":
            console.print(f"waiting for sites; here: {', '.join(line['sites']) or 'none'}")
        elif line["event"] == "refused":
            console.print(f"site '{line['client']}' is refused: {line['why']}")


def facts(line: Line) -> str:
    """A round in a few words."""
    parts = [f"round {line['round']}"]
    for key, name in (
        ("accuracy", "accuracy"),
        ("personal_accuracy", "personal"),
        ("loss", "loss"),
        ("local_loss", "local"),
        ("shift_loss", "shift"),
        ("aggregation_loss", "aggregation"),
    ):
        if line.get(key) is not None:
            parts.append(f"{name} {line[key]:.3f}")
    return "  ".join(parts)
