"""Helpers to build the tables of schedule families."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.lifetimes import bounds_of
from gpipe_hpc.schedule.table.rows import Row
from gpipe_hpc.schedule.table.schedule import Overlap, Placement, Schedule

Rows = Iterable[Sequence[Action]]


def tabulate(
    name: str, placement: Placement, rows: Rows, overlaps: Iterable[Overlap] = ()
) -> Schedule:
    """Return a table with the given rows; its bound of activations is what its order keeps.

    Actions of micro-batches that the placement does not have are dropped, together with their
    overlaps. A table made for more micro-batches stays valid, because micro-batches do not depend
    on each other.
    """

    kept = tuple(Row.of(row).below(placement.num_microbatches) for row in rows)
    end = placement.num_microbatches
    whole = tuple(
        (forward, backward)
        for forward, backward in overlaps
        if (forward.microbatch or 0) < end and (backward.microbatch or 0) < end
    )
    return Schedule(name, placement, kept, max_activations=bounds_of(kept), overlaps=whole)


class RankOrder:
    """Builder of one rank's actions; each op runs the micro-batches of a stage in order."""

    def __init__(self, microbatch_of: Callable[[int, int], int] | None = None) -> None:
        """Create an empty list.

        `microbatch_of(stage, index)` returns the `index`-th micro-batch of a stage; default:
        `index`.
        """
        self.actions: list[Action] = []
        self.overlaps: list[Overlap] = []
        self._microbatch_of = microbatch_of
        self._taken: dict[tuple[Op, int], int] = defaultdict(int)
        # For each stage, (sequence number, micro-batch) pairs whose ``W`` is still pending.
        self._owed: dict[int, deque[tuple[int, int]]] = defaultdict(deque)
        self._num_owed = 0

    def run(self, op: Op, stage: int) -> None:
        """Append an op for a stage's next micro-batch; after an ``I``, its ``W`` is pending."""
        kind = Op.I if op is Op.B else op, stage
        index = self._taken[kind]
        self._taken[kind] = index + 1
        microbatch = self._microbatch_of(stage, index) if self._microbatch_of else index
        self.actions.append(Action(op, stage, microbatch))
        if op is Op.I:
            self._owed[stage].append((self._num_owed, microbatch))
            self._num_owed += 1

    def overlap(self, forward: int, backward: int) -> None:
        """Append ``F`` of one stage and ``B`` of another as one overlapped block."""
        self.run(Op.F, forward)
        self.run(Op.B, backward)
        self.overlaps.append((self.actions[-2], self.actions[-1]))

    def pay(self, stage: int | None = None) -> None:
        """Append the oldest pending ``W`` of a stage, or of any stage if None."""
        if stage is None:
            _, stage = min((owed[0], each) for each, owed in self._owed.items() if owed)
        _, microbatch = self._owed[stage].popleft()
        self.actions.append(Action(Op.W, stage, microbatch))

    def taken(self, op: Op, stage: int) -> int:
        """Return how many micro-batches of a stage an op has run so far; ``B`` counts as ``I``."""
        return self._taken[op, stage]

    def num_owed(self, stage: int) -> int:
        """Return the number of pending ``W`` of a stage."""
        return len(self._owed[stage])


def in_slots(slots: Iterable[tuple[int, int, Action]], num_ranks: int) -> list[list[Action]]:
    """Return the actions of (rank, slot, action) triples as one list per rank, ordered by slot.

    Slots only define the order on a rank; start times are a result of simulation.
    """
    rows: list[list[tuple[int, Action]]] = [[] for _ in range(num_ranks)]
    for rank, slot, action in slots:
        rows[rank].append((slot, action))
    return [[action for _, action in sorted(row, key=itemgetter(0))] for row in rows]
