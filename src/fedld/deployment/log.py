"""The log file of a server or a site: whatever its processes print, with the time in UTC and without colours.

A process of its own writes it, so it also tells what the others said before they died. When a file is full,
it becomes NAME.1, NAME.1 becomes NAME.2, and the oldest goes.
"""

import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

LARGEST = 10 << 20
"""Bytes of one file."""
KEPT = 5
COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@contextmanager
def logged(file: Path, largest: int = LARGEST) -> Iterator[None]:
    """What this process and those that it starts print goes to the file, and on to where it went before."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    writer = os.fork()
    if writer == 0:
        os.close(writing)
        try:
            _write(reading, file, largest)
        finally:
            os._exit(0)
    os.close(reading)
    before = {number: os.dup(number) for number in (1, 2)}
    for number in before:
        os.dup2(writing, number)
    os.close(writing)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, saved in before.items():
            os.dup2(saved, number)
            os.close(saved)
        os.waitpid(writer, 0)


def _write(reading: int, file: Path, largest: int) -> None:
    """Until all who could print have ended; a signal to the group does not end the log before them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.raiseExceptions = False  # a full disk ends no server
    handler = RotatingFileHandler(file, maxBytes=largest, backupCount=KEPT, encoding="utf-8", delay=True)
    form = logging.Formatter("%(asctime)s.%(msecs)03dZ  %(message)s", "%Y-%m-%dT%H:%M:%S")
    form.converter = time.gmtime
    handler.setFormatter(form)
    coloured = os.isatty(1)
    with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            plain = COLOUR.sub("", line.rstrip("\n"))
            if plain.strip():
                handler.emit(logging.makeLogRecord({"msg": plain}))
            try:
                os.write(1, (line if coloured else f"{plain}\n").encode())
            except OSError:
                coloured = False  # nobody looks any more
