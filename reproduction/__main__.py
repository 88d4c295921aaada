"""Commands of the reproduction: `python -m reproduction add DIR...`, `candidates DIR`, `pages`, `figures`."""

import argparse
import sys
from pathlib import Path

from fedld.errors import FedLDError


def main(words: list[str] | None = None) -> None:
    """Run one command.

    Args:
        words: what stands behind `python -m reproduction`.
    """
    parser = argparse.ArgumentParser(prog="python -m reproduction", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("add", help="add finished studies to the tidy file")
    add.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    add.add_argument("--data", help="folder of the data sets, written as DATA")
    add.add_argument("--weights", help="file of the pretrained trunk, written as WEIGHTS")
    add.add_argument("--rows", help="replace these rows of earlier studies, such as measured,fedld-drift")
    candidates = commands.add_parser("candidates", help="make a search file of runs on held-out images")
    candidates.add_argument("runs", type=Path, metavar="DIR")
    pages = commands.add_parser("pages", help="write the generated blocks of README and docs")
    pages.add_argument("--check", action="store_true", help="only say which pages are not current")
    commands.add_parser("figures", help="draw the figures of the documentation")
    run = commands.add_parser("run", help="run the studies of some parts; finished runs are not made again")
    run.add_argument("parts", nargs="*", metavar="PART", help="all with the pretrained trunk unless given")
    run.add_argument("--data", required=True, type=Path, help="folder of the data sets")
    run.add_argument("--weights", type=Path, help="file of the MobileNetV2 trunk")
    run.add_argument("--weights2", type=Path, help="file of the EfficientNet-Lite0 trunk")
    run.add_argument("--out", required=True, type=Path, help="folder of the studies")
    run.add_argument("--only", default="*", help="pattern of the studies' names, such as 'covid-*'")
    run.add_argument("--jobs", type=int, help="runs at a time; one per core unless given")
    run.add_argument("--print", action="store_true", help="print the commands instead of running them")
    given = parser.parse_args(words)
    try:
        _run(given)
    except FedLDError as error:
        sys.exit(f"error: {error}")


def _run(given: argparse.Namespace) -> None:
    if given.command == "add" and given.rows:
        from reproduction.add import replace_rows

        print("\n".join(replace_rows(given.folders, given.rows.split(","))))
    elif given.command == "add":
        from reproduction.add import add

        machine = {given.weights: "WEIGHTS", given.data and given.data.rstrip("/"): "DATA"}
        print("\n".join(add(given.folders, {path: name for path, name in machine.items() if path})))
    elif given.command == "candidates":
        from reproduction.candidates import write_candidates

        print(write_candidates(given.runs))
    elif given.command == "pages":
        from reproduction.pages import update_pages

        stale = update_pages(write=not given.check)
        if given.check and stale:
            raise FedLDError(f"not current: {', '.join(stale)}; run: python -m reproduction pages")
        print("\n".join(f"rewritten: {page}" for page in stale))
    elif given.command == "run":
        _run_studies(given)
    else:
        from reproduction.figures import draw_all

        draw_all()


def _run_studies(given: argparse.Namespace) -> None:
    from reproduction.run import print_command, run_parts

    paths = {"DATA": given.data, "OUT": given.out, "WEIGHTS": given.weights, "WEIGHTS2": given.weights2}
    folders = run_parts(
        given.parts,
        {name: path for name, path in paths.items() if path},
        only=given.only,
        jobs=given.jobs,
        runner=print_command if given.print else None,
    )
    if not given.print:
        print(f"add them: python -m reproduction add {' '.join(map(str, folders))}")


if __name__ == "__main__":
    main()
