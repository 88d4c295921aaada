"""Make the figures of docs/performance.md and docs/performance-aggregation.md for one machine.

    python benchmarks/all.py [aggregation|engine|scale ...] [--tiny]

Each part takes about five minutes on two quiet cores. What is printed also goes to benchmarks.txt. `--tiny`
only shows that everything runs. Other frameworks, Flower and pretrained networks have scripts of their own,
since they need other installations.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from machine import describe

HERE, OUT = Path(__file__).parent, Path("benchmarks.txt")
TINY = "--tiny" in sys.argv
FULL_PARTS = {
    "aggregation": [["aggregation.py", "--busy", "--repeats", "3", "--parts", "speed", "naive", "memory"]],
    "engine": [["engine.py", "steps", "masks", "job", "cross", "profile"]],
    "scale": [["scale.py"]],
}
TINY_PARTS = {
    "aggregation": [["aggregation.py", "--busy", "--repeats", "1", "--clients", "2", "--parts", "speed"]],
    "engine": [["engine.py", "cross"]],
    "scale": [["scale.py", "--tiny", "many", "everyone", "personal", "candidates", "straggler"]],
}


def tell(line: str, out) -> None:
    print(line, end="", flush=True)
    out.write(line)
    out.flush()


def run(command: list[str], out) -> None:
    """One script, its output shown and kept."""
    begin = time.perf_counter()
    tell(f"\n### {' '.join(command)}\n", out)
    environment = os.environ | {"REPEATS": "1" if TINY else "3", "PYTHONUNBUFFERED": "1"}
    script = [sys.executable, str(HERE / command[0]), *command[1:]]
    process = subprocess.Popen(script, stdout=subprocess.PIPE, text=True, env=environment)
    for line in process.stdout:
        tell(line, out)
    if process.wait():
        tell(f"it ended with exit code {process.returncode}\n", out)
    tell(f"({(time.perf_counter() - begin) / 60:.1f} minutes)\n", out)


if __name__ == "__main__":
    parts = TINY_PARTS if TINY else FULL_PARTS
    with OUT.open("w") as file:
        tell(f"{describe()}\n", file)
        for name in [word for word in sys.argv[1:] if word != "--tiny"] or parts:
            for each in parts[name]:
                run(each, file)
