"""When hosts fail and come back: a Poisson process for each, the same for all policies."""

import random
from collections.abc import Iterator
from heapq import merge
from typing import NamedTuple

from experiments.resilience.inputs import Inputs


class Event(NamedTuple):
    """At `time_s` a host fails, or is back."""

    time_s: float
    is_up: bool
    host: int


def events(inputs: Inputs, seed: int) -> list[Event]:
    """Return what happens to all hosts, spare ones too, in the order of time.

    A host fails whether it works or waits; what happens to it depends on the seed and its number
    alone.
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
