"""Independent pieces of work on a few threads, each with single-threaded products.

A product that is itself shared among threads waits at a barrier for the slowest of them, thousands of times
in one aggregation; on a machine with other work that is a thread which the system has set aside. Pieces that
share nothing wait for nobody: whoever is free takes the next one.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def each(
    work: Callable[[T], R], tasks: Sequence[T], take: Callable[[R], object] = lambda result: None
) -> None:
    """`take(work(task))` for every task, taken in their order: the number of threads changes no bit.

    There are as many threads as PyTorch would use here (`torch.set_num_threads`).
    """
    with single_threaded_products() as threads:
        if min(threads, len(tasks)) == 1:
            for task in tasks:
                take(work(task))
            return
        with ThreadPoolExecutor(min(threads, len(tasks)), initializer=_prepare) as pool:
            for result in pool.map(work, tasks):
                take(result)


def _prepare() -> None:
    """Both settings belong to a thread."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)


@contextmanager
def single_threaded_products() -> Iterator[int]:
    """PyTorch's products of this thread run on it alone; gives the number of threads there were."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)
