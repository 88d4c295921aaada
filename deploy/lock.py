"""Write deploy/requirements.lock: every package of a server or site with the SHA-256 of its file.

    python deploy/lock.py > deploy/requirements.lock

Constraints cannot carry hashes here: one hash makes pip ask for hashes of everything, and neither the folder
of fedld itself nor the CPU build of torch, which comes from another index, has one. The lock is for CPython
3.11 on Linux x86-64, as the image is; `install.sh` installs elsewhere from the constraints alone.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
WITHOUT = {"fedld", "torch"}


def main() -> None:
    """Let pip resolve, and write down what it would take."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--report", str(report), "--constraint", str(ROOT / "constraints.txt")]
        subprocess.run([*command, f"{ROOT}[flower,dicom]"], check=True, stdout=sys.stderr)
        found = json.loads(report.read_text())["install"]
    print(
        "# Made by `python deploy/lock.py`, for CPython 3.11 on Linux x86-64; torch and fedld are not in it."
    )
    for one in sorted(found, key=lambda one: one["metadata"]["name"].lower()):
        name, version = one["metadata"]["name"], one["metadata"]["version"]
        if name.lower() not in WITHOUT:
            digest = one["download_info"]["archive_info"]["hashes"]["sha256"]
            print(f"{name}=={version} --hash=sha256:{digest}")


if __name__ == "__main__":
    main()
