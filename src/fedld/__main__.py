"""Entry point of `fedld`: starts the workers' server before the imports that take seconds."""

import sys

from fedld.engine.processes import warm_up

TRAINING = ("run", "compare", "reproduce", "tune")


def main() -> None:
    """Run a command; bad input is one sentence on standard error and exit code 2."""
    if sys.argv[1:2] and sys.argv[1] in TRAINING and "--help" not in sys.argv:
        warm_up()
    from fedld.cli import start

    start()


if __name__ == "__main__":
    main()
