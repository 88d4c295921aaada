"""Seconds a round of fedld on Flower against Flower's own FedAvg quickstart: same model, data and machine.

python benchmarks/flower.py [ROUNDS]
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Machine:
    """A SuperLink and three SuperNodes on loopback: Flower's as they are, or started by fedld."""

    def __init__(self, folder, warm):
        self.folder, self.port, self.running = folder, free_port(), []
        home = folder / "home"
        home.mkdir(exist_ok=True)
        address = f'address = "127.0.0.1:{self.port}"'
        (home / "config.toml").write_text(f"[superlink.here]\n{address}\ninsecure = true\n")
        self.environment = os.environ | {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "FLWR_HOME": str(home),
            "FEDLD_CACHE": str(folder / "cache"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
        }
        link = f"127.0.0.1:{self.port}"
        if warm:
            self.start("fedld", "server", "start", "--insecure", "--port", str(self.port))
        else:
            flag = "--disable-runtime-dependency-installation"
            self.start("flower-superlink", "--insecure", "--port", str(self.port), flag)
        for k in (1, 2, 3):
            data, state = folder / f"demo/site_{k}.npz", folder / f"state-{k}"
            if warm:
                words = ["--name", f"site_{k}", "--data", str(data), "--state", str(state)]
                self.start("fedld", "site", "start", "--insecure", "--superlink", link, *words)
            else:
                told = f'site="site_{k}" data="{data}" state="{state}"'
                words = ["--port", str(free_port()), "--node-config", told]
                self.start("flower-supernode", "--insecure", "--superlink", link, *words)
        while not (self.listens() and (not warm or (folder / "runs/running.json").exists())):
            time.sleep(0.5)

    def listens(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def start(self, *words):
        log = (self.folder / "log").open("ab")
        self.running.append(
            subprocess.Popen(words, env=self.environment, cwd=self.folder, stdout=log, stderr=log)
        )

    def call(self, *words):
        found = subprocess.run(words, env=self.environment, cwd=self.folder, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr
        return found.stdout

    def quickstart(self, rounds, evaluate):
        config = f"rounds={rounds} evaluate={evaluate}"
        said = self.call("flwr", "run", str(HERE / "quickstart"), "here", "--stream", "-c", config)
        return float(re.search(r"seconds a round: ([\d.]+)", said)[1])

    def fedld(self, rounds, name):
        settings = ["--dataset", "npz:demo/test.npz", "--clients", "3", "--rounds", str(rounds)]
        place = ["--engine", "flower", "--out", f"runs/{name}"]
        self.call("fedld", "run", *settings, *place)
        lines = [
            json.loads(line) for line in (self.folder / f"runs/{name}/rounds.jsonl").read_text().splitlines()
        ]
        return sum(line["seconds"] for line in lines) / rounds

    def close(self):
        for process in self.running:
            process.terminate()
        for process in self.running:
            process.wait(30)


def show(what, seconds):
    print(f"{what:<42}{seconds:6.2f} s a round", flush=True)


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = Machine(folder, warm=False)
        try:
            plain.call("fedld", "site", "demo", "--out", "demo")
            show("Flower's quickstart, train and evaluate", plain.quickstart(rounds, 1.0))
            show("Flower's quickstart, train only", plain.quickstart(rounds, 0.0))
        finally:
            plain.close()
        warm = Machine(folder, warm=True)
        try:
            show("fedld on `fedld site start`", warm.fedld(rounds, "warm"))
        finally:
            warm.close()


if __name__ == "__main__":
    main()
