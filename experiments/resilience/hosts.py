"""Failure and return times of hosts: an independent Poisson process for each host."""

import random
from collections.abc import Iterator
from heapq import merge
from typing import NamedTuple

from experiments.resilience.inputs import Inputs


class Event(NamedTuple):
    """A host fails or returns at `time_s`."""

    time_s: float
    is_up: bool
    host: int


def events(inputs: Inputs, seed: int) -> list[Event]:
    """Return the events of all hosts, including spare ones, in order of time.

    A host fails whether it works or is idle; its events depend only on the seed and its number.
    """
    count = inputs.num_hosts + inputs.spare_hosts
    return list(merge(*(_of_host(inputs, seed, host) for host in range(count))))


def _of_host(inputs: Inputs, seed: int, host: int) -> Iterator[Event]:
    draws = random.Random(f"{seed}/{host}")
    now_s = draws.expovariate(1 / inputs.mtbf_s)
    while now_s < inputs.horizon_s:
        yield Event(now_s, False, host)
        now_s += inputs.repair_s
        yield Event(now_s, True, host)
        now_s += draws.expovariate(1 / inputs.mtbf_s)
