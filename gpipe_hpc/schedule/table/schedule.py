"""The schedule table: a placement of stages on ranks and an action list for each rank."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.table.actions import COMPUTE, COPIES, Action, Op
from gpipe_hpc.schedule.table.rows import RemoteRow, Row

# A forward and the backward of another stage that the same rank runs as one block.
Overlap = tuple[Action, Action]
# A long skip: the stage that stashes tensors, and the later one that pops them.
Skip = tuple[int, int]


@dataclass(frozen=True)
class Placement:
    """The rank that runs each stage for each micro-batch.

    ``routes[route][stage]`` is a rank and ``route_of[microbatch]`` the index of a route. Most
    placements have one route; those that hold a stage on several ranks (mirrored pipelines) have
    several.
    """

    routes: tuple[tuple[int, ...], ...]
    route_of: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that routes have equal numbers of stages and every micro-batch has a route."""
        if not self.routes or not self.routes[0] or not self.route_of:
            raise ScheduleError("placement: needs at least one stage and one micro-batch, got none")
        if len({len(route) for route in self.routes}) > 1:
            raise ScheduleError(
                "placement: all routes need the same number of stages, "
                f"got {[len(route) for route in self.routes]}"
            )
        if min(self.route_of) < 0 or max(self.route_of) >= len(self.routes):
            raise ScheduleError(
                f"placement: route_of must contain route indices from 0 to "
                f"{len(self.routes) - 1}, got {sorted(set(self.route_of))}"
            )
        if min(map(min, self.routes)) < 0:
            raise ScheduleError(f"placement: negative rank, got {self.routes}")

    @property
    def num_stages(self) -> int:
        """Return the number of stages of the model."""
        return len(self.routes[0])

    @cached_property
    def num_ranks(self) -> int:
        """Return the number of ranks, including those without a stage."""
        return 1 + max(map(max, self.routes))

    @property
    def num_microbatches(self) -> int:
        """Return the number of micro-batches of one step."""
        return len(self.route_of)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs a stage for a micro-batch."""
        return self.routes[self.route_of[microbatch]][stage]

    def holders(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that hold a stage, sorted."""
        return self._holders[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, sorted."""
        return self._stages_of.get(rank, ())

    @cached_property
    def _stages_of(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for stage, ranks in enumerate(self._holders):
            for rank in ranks:
                found.setdefault(rank, []).append(stage)
        return {rank: tuple(stages) for rank, stages in found.items()}

    @cached_property
    def _holders(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(set(ranks))) for ranks in zip(*self.routes, strict=True))


@dataclass(frozen=True)
class Schedule:
    """A schedule table: the ordered actions of each rank.

    Args:
        name: name of the schedule, used in messages.
        placement: rank of each stage for each micro-batch.
        ranks: one sequence of actions per rank, packed into `Row`s. During a run, rank 0 has all
            rows; other ranks have their own row and a `RemoteRow` for each other rank.
        max_activations: for each rank, the largest number of (stage, micro-batch) pairs whose
            activations it keeps at once; None if not declared.
        max_receives: for each rank, the largest number of posted receive buffers; None if not
            declared.
        overlaps: pairs of an ``F`` and the next ``B`` on its rank that run as one block. The output
            of the ``F`` is sent when both are done.
        skips: sorted pairs (source, destination) of stages, at least two apart, of which the first
            sends tensors directly to the second.
    """

    name: str
    placement: Placement
    ranks: tuple[Sequence[Action], ...]
    max_activations: tuple[int, ...] | None = None
    max_receives: tuple[int, ...] | None = None
    overlaps: tuple[Overlap, ...] = ()
    skips: tuple[Skip, ...] = ()

    def __post_init__(self) -> None:
        """Pack the rows and check that skips are sorted and join stages at least two apart."""
        packed = (row if isinstance(row, RemoteRow) else Row.of(row) for row in self.ranks)
        object.__setattr__(self, "ranks", tuple(packed))
        last = self.num_stages - 1
        for source, destination in self.skips:
            if not (source >= 0 and source + 2 <= destination <= last):
                raise ScheduleError(
                    f"schedule {self.name!r}: invalid skip ({source}, {destination}): a skip joins "
                    f"stages of 0 to {last} that are at least two apart; remove skips to the next "
                    "stage or within one stage"
                )
        if list(self.skips) != sorted(set(self.skips)):
            raise ScheduleError(
                f"schedule {self.name!r}: skips must be sorted and unique, got {self.skips}"
            )

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Return the packed actions of all ranks.

        Raises ScheduleError if this process has only the row of its own rank.
        """
        return tuple(map(Row.of, self.ranks))

    @cached_property
    def ops(self) -> frozenset[Op]:
        """Return the set of ops in the table."""
        return frozenset(op for row in self.rows for op in row.ops)

    @property
    def num_actions(self) -> int:
        """Return the number of actions of all ranks."""
        return sum(map(len, self.ranks))

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return self.placement.num_stages

    @property
    def num_microbatches(self) -> int:
        """Return the number of micro-batches of one step."""
        return self.placement.num_microbatches

    @cached_property
    def is_lowered(self) -> bool:
        """Return whether the table contains communication and reductions."""
        return self.max_receives is not None or not self.ops <= COMPUTE | COPIES

    @cached_property
    def hash(self) -> str:
        """Return the SHA-256 digest of the table, computed once."""
        sha = hashlib.sha256()
        head = (self.placement, self.max_activations, self.max_receives)
        sha.update(repr(head).encode())
        pairs = (f"{forward} {backward}" for forward, backward in self.overlaps)
        sha.update(";".join(pairs).encode())
        if self.skips:
            sha.update(f"\nskips {self.skips}".encode())
        for row in self.ranks:
            assert isinstance(row, Row | RemoteRow), "rows are packed"
            sha.update(f"\n{row.digest()}".encode())
        return sha.hexdigest()


def digest(schedule: Schedule) -> str:
    """Return the SHA-256 digest of placement, actions, bounds and skips of a table.

    The name is not part of it. The digest is the same in every process; ranks compare it before the
    first step.
    """
    return schedule.hash


def without_rows(schedule: Schedule) -> Schedule:
    """Return a table in which each row is replaced by its length and digest."""
    rows = (RemoteRow(rank, len(row), row.digest()) for rank, row in enumerate(schedule.rows))
    return replace(schedule, ranks=tuple(rows))


def with_row(schedule: Schedule, rank: int, row: Row) -> Schedule:
    """Return a table of `without_rows` with the row of one rank inserted.

    Raises ScheduleError if the digest of the row differs from that of the original row.
    """
    expected = schedule.ranks[rank]
    assert isinstance(expected, RemoteRow), f"rank {rank} has its row already"
    if row.digest() != expected.digest():
        raise ScheduleError(
            f"schedule {schedule.name!r}, rank {rank}: received a row of {len(row)} actions and "
            f"digest {row.digest()[:12]}, but rank 0 built {len(expected)} actions with digest "
            f"{expected.digest()[:12]}; start all ranks with the same version of gpipe_hpc"
        )
    return replace(schedule, ranks=(*schedule.ranks[:rank], row, *schedule.ranks[rank + 1 :]))
