"""Entry point of `fedld`: starts the workers' server before the imports that take seconds."""

import sys

from fedld.engine.backends.processes import warm_up

TRAINING = ("run", "compare", "reproduce", "tune")


def main() -> None:
    """Run a command; bad input is one sentence on standard error and exit code 2."""
    try:
        if set(sys.argv[1:3]) & set(TRAINING) and "--help" not in sys.argv:
            warm_up()
        from fedld.cli import start

        start()
    except KeyboardInterrupt:  # also while the imports are under way
        print("fedld: stopped", file=sys.stderr)
        # CPython remembers an interrupt that left an exec() of text, as imports of dataclasses do, and would
        # end by that signal whatever exit code follows; the next exec() makes it forget.
        exec("")
        sys.exit(130)


if __name__ == "__main__":
    main()
