#!/bin/sh
# install.sh FOLDER: fedld for servers and sites in a virtual environment of its own, every version as the
# constraints say, torch without CUDA. On CPython 3.11, Linux x86-64, all files but torch's are compared with the
# SHA-256 hashes in requirements.lock. Run it from anywhere; it is also what the Dockerfile runs.
set -eu
[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
source=$(cd "$(dirname "$0")/.." && pwd)
[ ! -e "$1" ] || { echo "$1 exists: name a new folder (it cannot be moved later; use a link)" >&2; exit 2; }
"${PYTHON:-python3}" -m venv "$1"
if [ "$("$1/bin/python" -c 'import platform as p; print(p.python_version()[:5], p.system(), p.machine())')" = \
    "3.11. Linux x86_64" ]; then
    "$1/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir --no-deps --require-hashes \
        --requirement "$source/deploy/requirements.lock"
else
    echo "no hashes for this Python or machine: versions are pinned, files are not compared" >&2
fi
"$1/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir --constraint "$source/constraints.txt" \
    --extra-index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" "$source[flower,dicom]"
"$1/bin/fedld" --version
