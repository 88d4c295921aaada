"""What a secure sum adds to a round on Flower: seconds a round with and without it, in turn on one machine.

python benchmarks/secure_sum.py [SITES] [ROUNDS] [TRAIN] [MINUTES]

By default 12 sites, 3 rounds of each kind, the whole of MobileNetV2 (all; or last:N, head), and at most 10
minutes: rounds that do not fit are not made. All sites share the machine's cores, so both training and
messages take longer here than at sites of their own.
"""

import os
import signal
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

    def seconds(self, out: str, rounds: int, train: str, end: float, *options: str) -> list[float]:
        """Seconds of rounds until an end; the first line also has what is done once, the last no training."""
        count = len(self.running) - 1
        words = ["--engine", "flower", "--dataset", "npz:demo/test.npz", "--clients", str(count)]
        words += ["--model", "mobilenet_v2", "--train", train, "--rounds", str(rounds + 2)]
        words += ["--no-client-losses", "--set", "dry_run=false", "--out", f"runs/{out}", *options]
        self.start("run", *words)
        run, finished = self.running.pop(), False
        try:
            assert run.wait(max(1.0, end - time.monotonic())) == 0, (self.folder / "log").read_text()
            finished = True
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGINT)  # ends the run at the server too
            run.wait(60)
        lines = read_lines(self.folder / "runs" / out, ROUNDS)
        return [line["seconds"] for line in lines][1 : -1 if finished else None]

    def close(self) -> None:
        for process in self.running:
            process.terminate()
        for process in self.running:
            process.wait(60)


def main() -> None:
    """Print the seconds of both kinds of rounds, their ratio, and the machine's load."""
    words = [*sys.argv[1:], *("12", "3", "all", "10")[len(sys.argv) - 1 :]]
    count, rounds, train, minutes = int(words[0]), int(words[1]), words[2], float(words[3])
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        sites = Sites(Path(name), count)
        try:
            plain = sites.seconds("plain", rounds, train, begin + 60 * (0.4 * minutes))
            end = begin + 60 * (minutes - 1)
            summed = sites.seconds("summed", rounds, train, end, "--secure", "sum")
        finally:
            sites.close()
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"{count} sites, MobileNetV2, train = {train}; load of the machine {load}")
    if not plain or not summed:
        rounds_made = f"{len(plain)} plain rounds and {len(summed)} secure ones after the first"
        sys.exit(f"only {rounds_made} were finished in time: give it more MINUTES, or fewer SITES")
    for what, seconds in (("plain", plain), ("secure sum", summed)):
        print(f"{what:<12}{statistics.median(seconds):8.2f} s a round  {[round(x, 2) for x in seconds]}")
    print(f"{'ratio':<12}{statistics.median(summed) / statistics.median(plain):8.2f}")


if __name__ == "__main__":
    main()
