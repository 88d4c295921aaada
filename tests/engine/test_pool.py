"""Jobs on workers of unequal speed, in a time that is counted and not waited for."""

from heapq import heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedld.engine.backends.pool import Paces, Unit


def round_time(paces, costs, slowness, *, learn=True):
    """When the last job of a round ends, jobs as they are handed out by the pool."""
    waiting = sorted((Unit((i,), "train", cost) for i, cost in enumerate(costs)), key=lambda u: u.cost)
    running, clock = [], 0.0  # (end, worker, unit, begin)
    while waiting or running:
        for k in range(len(slowness)):
            busy = {one[1]: one for one in running}
            if k in busy or not waiting:
                continue
            left = [
                paces.left(j, busy[j][2], clock - busy[j][3]) if j in busy else 0.0
                for j in range(len(slowness))
            ]
            place = paces.choose(k, waiting, left)
            if place is not None:
                unit = waiting.pop(place)
                heappush(running, (clock + unit.cost * slowness[k], k, unit, clock))
        assert running, "somebody always takes a job"
        clock, k, unit, begin = heappop(running)
        if learn:
            paces.learn(k, unit, clock - begin)
    return clock


def test_equal_workers_take_the_longest_first():
    paces = Paces(2)
    assert round_time(paces, [10, 1, 1, 1, 1], [1, 1]) == 10
    assert round_time(paces, [5, 5, 4, 3, 3], [1, 1]) == 11  # longest first: 5 3 3 and 5 4
    assert Paces(2).choose(1, [Unit((0,), "train", 1), Unit((1,), "train", 2)], [0.0, 0.0]) == 1


def test_a_slow_worker_leaves_the_last_long_job_to_a_fast_one():
    """Two workers, one with a third of a core, and five equal jobs: with one of them it has its share."""
    costs, slowness = [10] * 5, [3, 1]
    assert round_time(Paces(2), costs, slowness, learn=False) == 60  # while nobody knows, it takes a second
    paces = Paces(2)
    times = [round_time(paces, costs, slowness) for _ in range(5)]
    assert times[-1] == 40
    assert round_time(paces, [10] * 4 + [1] * 6, slowness) <= 36  # and short ones while the other is at work


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.5, 20), min_size=1, max_size=30),
    st.lists(st.floats(1, 5), min_size=1, max_size=4),
)
def test_once_paces_are_known_a_round_takes_at_most_twice_the_best(costs, slowness):
    paces = Paces(len(slowness))
    for _ in range(12):  # every worker gets to show its pace
        for k, slow in enumerate(slowness):
            paces.learn(k, Unit((0,), "train", 1.0), slow)
    best = max(sum(costs) / sum(1 / slow for slow in slowness), max(costs) * min(slowness))
    assert round_time(paces, costs, slowness) <= 2 * best * (1 + 1e-3)


def test_a_worker_that_is_fast_again_is_known_to_be():
    paces, unit = Paces(2), Unit((0,), "train", 2.0)
    for seconds in (2.0, 2.0, 8.0, 8.0, 8.0):
        paces.learn(0, unit, 2.0)
        paces.learn(1, unit, seconds)
    slow = paces.expected(1, unit) / paces.expected(0, unit)
    assert slow > 2.5
    for _ in range(6):
        paces.learn(0, unit, 2.0)
        paces.learn(1, unit, 2.0)
    assert paces.expected(1, unit) / paces.expected(0, unit) == pytest.approx(1, abs=0.15)
