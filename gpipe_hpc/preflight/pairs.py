"""Order pairwise exchanges so that no rank takes part in two at the same time."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

Pair = tuple[int, int]


def in_rounds(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Divide pairs of ranks into rounds in which each rank occurs at most once.

    Deterministic, so that all ranks get the same rounds. Each pair occurs once, its lower rank
    first. The pairs of a chain take two rounds.
    """
    each = {(min(pair), max(pair)) for pair in pairs}
    rounds: list[list[Pair]] = []
    busy: list[set[int]] = []
    for pair in sorted(each, key=lambda pair: (pair[0] % 2, pair)):
        place = next((i for i, ranks in enumerate(busy) if ranks.isdisjoint(pair)), len(rounds))
        if place == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[place].append(pair)
        busy[place].update(pair)
    return rounds


def ring(ranks: Sequence[int]) -> list[Pair]:
    """Return the pairs of neighbours in a ring over some ranks."""
    if len(ranks) < 2:
        return []
    return sorted({(min(p), max(p)) for p in pairwise([*ranks, ranks[0]])})
