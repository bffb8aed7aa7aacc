"""Simulation of any plans in the model with one port, independent of the algorithm."""

from collections import defaultdict
from collections.abc import Sequence

from experiments.outer.collectives.costs import Link
from gpipe_hpc.comm.collectives.plan import Plan


def simulated_s(plans: Sequence[Plan], link: Link) -> float:
    """Return the time at which the last rank is done; an element is one byte.

    A step starts when the previous one has ended. It ends, together with the steps of its partners,
    when all have started and the longest transfer of any of their ports is complete.
    """
    sends: dict[tuple[int, int], list[int]] = defaultdict(list)
    receives: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, plan in enumerate(plans):
        for number, step in enumerate(plan):
            for move in step.sends:
                sends[rank, move.peer].append(number)
            for move in step.adds + step.takes:
                receives[move.peer, rank].append(number)
    partners: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for (a, b), out in sends.items():
        for number, other in zip(out, receives[a, b], strict=True):
            partners[a, number].add((b, other))
            partners[b, other].add((a, number))

    def carried_s(rank: int, number: int) -> float:
        step = plans[rank][number]
        ports = (step.sends, step.adds + step.takes)
        return max(sum(link.start_s + m.span.length * link.byte_s for m in port) for port in ports)

    ended: list[list[float]] = [[] for _ in plans]
    while any(len(done) < len(plan) for done, plan in zip(ended, plans, strict=True)):
        before = [len(done) for done in ended]
        for rank, plan in enumerate(plans):
            number = before[rank]
            if number == len(plan):
                continue
            with_me = {(rank, number), *partners[rank, number]}
            if all(before[r] >= n for r, n in with_me):
                begun = max(ended[r][n - 1] if n else 0.0 for r, n in with_me)
                took = max(carried_s(r, n) for r, n in with_me)
                added = sum(move.span.length for move in plan[number].adds) * link.add_s
                ended[rank].append(begun + took + added)
        assert before != [len(done) for done in ended], "every rank waits"
    return max((done[-1] for done in ended if done), default=0.0)
