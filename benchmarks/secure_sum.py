"""What a secure sum adds to a round on Flower: seconds a round with and without it, in turn on one machine.

python benchmarks/secure_sum.py [SITES] [ROUNDS] [TRAIN]

TRAIN is the trained part of MobileNetV2: all, last:N or head. All sites share the machine's cores, so both
training and messages take longer here than at sites of their own.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedld.deployment.keys import make_peer_key
from fedld.privacy.peers import merged_peers, peers_text
from fedld.records.schema import ROUNDS
from fedld.records.writer import read_lines
from flower import BIN, free_port


class Sites:
    """A server and its sites on loopback, with pinned keys."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.running = folder, []
        self.environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        self.environment |= {"FEDLD_CACHE": str(folder / "cache"), "FLWR_HOME": str(folder)}
        names = [f"site_{k}" for k in range(1, count + 1)]
        self.call("site", "demo", "--out", "demo", "--clients", str(count))
        for name in names:
            make_peer_key(name, folder)
        keys = merged_peers(folder / f"{name}.peer.toml" for name in names)
        (folder / "peers.toml").write_text(peers_text(keys))
        port = str(free_port())
        self.start("server", "start", "--insecure", "--port", port)
        while not (folder / "runs" / "running.json").exists():
            time.sleep(0.5)
        for name in names:
            words = ["--name", name, "--data", f"demo/{name}.npz", "--superlink", f"127.0.0.1:{port}"]
            keys = ["--peers", "peers.toml", "--peer-key", f"{name}.peer.key", "--min-images", "2"]
            self.start("site", "start", "--insecure", *words, *keys)

    def start(self, *words: str) -> None:
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                ["fedld", *words], env=self.environment, cwd=self.folder, stdout=log, stderr=log
            )
        self.running.append(process)

    def call(self, *words: str) -> None:
        found = subprocess.run(
            ["fedld", *words], env=self.environment, cwd=self.folder, capture_output=True, text=True
        )
        assert found.returncode == 0, found.stdout + found.stderr

    def seconds(self, out: str, count: int, rounds: int, train: str, *options: str) -> list[float]:
        """Seconds of rounds; the first line also has what is done once, the last one no training."""
        words = ["--engine", "flower", "--dataset", "npz:demo/test.npz", "--clients", str(count)]
        words += ["--model", "mobilenet_v2", "--train", train, "--rounds", str(rounds + 2)]
        words += ["--no-client-losses", "--set", "canary=false", "--out", f"runs/{out}", *options]
        self.call("run", *words)
        return [line["seconds"] for line in read_lines(self.folder / "runs" / out, ROUNDS)][1:-1]

    def close(self) -> None:
        for process in self.running:
            process.terminate()
        for process in self.running:
            process.wait(60)


def main() -> None:
    """Print the seconds of both kinds of rounds, their ratio, and the machine's load."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    train = sys.argv[3] if len(sys.argv) > 3 else "last:4"
    with tempfile.TemporaryDirectory() as name:
        sites = Sites(Path(name), count)
        try:
            plain = sites.seconds("plain", count, rounds, train)
            summed = sites.seconds("summed", count, rounds, train, "--secure", "sum")
        finally:
            sites.close()
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"{count} sites, MobileNetV2, train = {train}; load of the machine {load}")
    for what, seconds in (("plain", plain), ("secure sum", summed)):
        print(f"{what:<12}{statistics.median(seconds):8.2f} s a round  {[round(x, 2) for x in seconds]}")
    print(f"{'ratio':<12}{statistics.median(summed) / statistics.median(plain):8.2f}")


if __name__ == "__main__":
    main()
