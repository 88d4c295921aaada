"""Bad input by the thousand: `python tests/fuzz/fuzz.py KIND COUNT`, and a seed; kinds are in `CASES`.

Every case must end well or in a `FedLDError`, within two minutes, below 2 GiB, and without a file written.
What does not is printed with its number, so that `--only N` repeats it.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import configurations
import files
import messages
import secure

from fedld.data import DataSpec, load
from fedld.engine.hardware import peak_memory
from fedld.errors import FedLDError

CASES: dict[str, Callable[[random.Random, Path], Callable[[], object]]] = {
    "configurations": configurations.make_case,
    "files": files.make_case,
    "messages": messages.make_case,
    "secure": secure.make_case,
}
SECONDS = 120
MEMORY = 2 << 30


class Hang(BaseException):
    """A case that did not end."""


def _alarm(*_: object) -> None:
    raise Hang


def _listing(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


def attempt(kind: str, seed: int, number: int, folder: Path) -> str | None:
    """What went wrong with one case, or None."""
    here = folder / f"case_{number}"
    here.mkdir()
    case = CASES[kind](random.Random(f"{kind}/{seed}/{number}"), here)
    before = _listing(here)
    signal.alarm(SECONDS)
    try:
        case()
    except FedLDError as error:
        if not str(error).strip() or "\n" in str(error):
            return f"not one sentence: {str(error)!r}"
    except Hang:
        return "hangs"
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.alarm(0)
    written = _listing(here) - before
    return f"writes {sorted(written)}" if written else None


def main() -> int:
    """Try them all; the number of those that went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=CASES)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    asked = parser.parse_args()
    signal.signal(signal.SIGALRM, _alarm)
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        os.environ["FEDLD_CACHE"] = f"{name}/cache"
        load(DataSpec(dataset="digits"))  # imports and the cache, which a busy machine takes long for
        for number in range(asked.count) if asked.only is None else [asked.only]:
            trouble = attempt(asked.kind, asked.seed, number, Path(name))
            if trouble:
                bad += 1
                print(f"{asked.kind} {number}: {trouble}\n", flush=True)
    peak = peak_memory()
    print(f"{asked.kind}: {bad} of {asked.count} went wrong; at most {peak / 2**20:.0f} MiB")
    return 1 if bad or peak > MEMORY else 0


if __name__ == "__main__":
    sys.exit(main())
