"""A seeded sample of bad input in every test run; `make fuzz` tries the whole of it."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("kind", "count"), [("configurations", 250), ("files", 150), ("messages", 150), ("secure", 60)]
)
def test_bad_input_is_one_sentence_and_leaves_no_file(kind, count):
    command = [sys.executable, Path(__file__).with_name("fuzz.py"), kind, str(count)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
