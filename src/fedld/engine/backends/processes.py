"""Processes of one thread each, forked from a server process that has torch loaded.

Importing torch takes longer than a round of a small study. The server imports it once, while the main process
imports it too, and has run nothing that a fork could break.
"""

import ctypes
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, get_all_start_methods, get_context, parent_process
from multiprocessing.context import BaseContext
from threading import Thread

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_TOP_PAD = -1, -3, -2


def processes() -> BaseContext:
    """Say how worker processes start: by the fork server, or anew where there is none (Windows).

    Start them within `one_thread()`.
    """
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(["fedld.engine.worker"])
    return context


def warm_up() -> None:
    """Start the server now, so that it imports while this process does."""
    if processes().get_start_method() == "forkserver":
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is not for the server
        try:
            with one_thread():
                forkserver.ensure_running()
        finally:
            signal.signal(signal.SIGINT, handler)


@contextmanager
def without_main(*needed: object) -> Iterator[None]:
    """Let children that start here not import the calling script, unless something they get is defined in it.

    So a script needs no `if __name__ == "__main__":` to run an experiment; one with a method of its own does.
    """
    main = sys.modules["__main__"]
    if any(b"__main__" in pickle.dumps(part) for part in needed):
        yield
        return
    spec, file = main.__spec__, getattr(main, "__file__", None)
    try:
        main.__spec__ = main.__file__ = None
        yield
    finally:
        main.__spec__, main.__file__ = spec, file


def end_with_parent() -> None:
    """End this process when the one that started it ends, however it ends."""

    def watch() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    Thread(target=watch, daemon=True).start()


def tune_process() -> None:
    """Set one thread; and glibc keeps freed memory: giving activations back each step costs page faults."""
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD):
        mallopt(option, 256 << 20 if option == M_TOP_PAD else 1 << 30)


@contextmanager
def serially() -> Iterator[None]:
    """Compute with one thread: on a few images more would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class one_thread:  # noqa: N801 (a context manager, used like a function)
    """Environment in which child processes start with one thread."""

    def __enter__(self) -> None:
        self._before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = self._before
