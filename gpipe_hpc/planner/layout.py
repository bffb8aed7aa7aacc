"""Decide how a model is laid out: cut, table and recomputation."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gpipe_hpc.data_parallel import MicrobatchSplit
from gpipe_hpc.engine.stages.tables import Tables
from gpipe_hpc.errors import ConfigError, ScheduleError
from gpipe_hpc.models import (
    find_skips,
    long_skips,
    skip_routes,
)
from gpipe_hpc.planner.buckets import buckets_of
from gpipe_hpc.planner.costs.gauges import Gauge
from gpipe_hpc.planner.cutting.partition import Partition, choose_partition
from gpipe_hpc.planner.cutting.pins import read_pins
from gpipe_hpc.planner.memory.sharing import Sharing
from gpipe_hpc.planner.ordering import (
    Order,
    compares_placements,
    order,
    paces_of,
    place_name,
    shared_by,
    stages_of,
)
from gpipe_hpc.planner.request import Request
from gpipe_hpc.planner.tables import dressed, make_tables
from gpipe_hpc.schedule import Row, Schedule, digest, with_row, without_rows


@dataclass(frozen=True)
class Layout:
    """All that is decided before a run: plain data, made once, on rank 0, which keeps all of it.

    Every other rank gets it with its own rows of the tables alone, see `hand_out`.

    `partition` is the cut; placement, order of the work and what is offloaded stand in `tables`.
    `recomputed`: the layers of each stage that an ``R`` runs again, by their index; None for all.
    Both are those of the replica with the most micro-batches, and `others` those of replicas with
    fewer. `portions`: how many each of the replicas has. `shard`: as in `Outer`. `searched` and
    `budget` say in words what was compared and chosen; they decide nothing.
    """

    partition: Partition
    tables: Tables
    recomputed: tuple[frozenset[int], ...] | None = None
    portions: MicrobatchSplit = field(default_factory=MicrobatchSplit)
    searched: str = ""
    budget: str = ""
    others: "tuple[Layout, ...]" = ()
    shard: str = "none"

    @property
    def sharing(self) -> Sharing | None:
        """Return how the optimizer's state is divided over copies; None: each has all of it."""
        return Sharing.of(self.shard, self.portions.num_replicas, self.tables.buckets)

    @property
    def schedule(self) -> Schedule:
        """Return the lowered table of a training step."""
        return self.tables.training

    @property
    def replicas(self) -> int:
        """Return how many such pipelines run side by side."""
        return self.portions.num_replicas

    def of(self, replica: int) -> "Layout":
        """Return the layout of one replica: its own tables, and what it recomputes."""
        count = len(self.portions.of(replica))
        return next(e for e in (self, *self.others) if e.schedule.num_microbatches == count)

    def rows(self, rank: int) -> list[Row]:
        """Return the rows of a rank: of its tables, and of those of replicas with fewer."""
        own = [table.rows[rank] for table in self.tables.schedules]
        return own + [row for each in self.others for row in each.rows(rank)]

    def without_rows(self) -> "Layout":
        """Return the same with no rank's rows, whose digests stay."""
        tables = self.tables.with_schedules([*map(without_rows, self.tables.schedules)])
        return replace(self, tables=tables, others=tuple(e.without_rows() for e in self.others))

    def with_rows(self, rank: int, rows: Sequence[Row]) -> "Layout":
        """Return one without rows with those of a rank; ScheduleError if they are not the same."""
        left = iter(rows)
        layouts = [
            replace(
                each,
                tables=each.tables.with_schedules(
                    [with_row(table, rank, next(left)) for table in each.tables.schedules]
                ),
            )
            for each in (self, *self.others)
        ]
        return replace(layouts[0], others=tuple(layouts[1:]))

    def digest(self) -> str:
        """Return a hash of all that decides a run, the same in every process."""
        again = [sorted(layers) for layers in self.recomputed or ()]
        runs_all = self.recomputed is None
        tables = [digest(table) for table in self.tables.schedules], self.tables.buckets
        others = [each.digest() for each in self.others]
        decided = self.partition.counts, runs_all, again, self.portions, others, *tables
        return hashlib.sha256(repr(decided).encode()).hexdigest()


def lay_out(request: Request, gauge: Gauge) -> Layout:
    """Lay out what is asked for, on `request.stages` ranks, by what a gauge says of the layers.

    The same request and the same figures give the same layout, whoever asks. Raises ConfigError,
    ModelError, PartitionError or ScheduleError for what cannot work.
    """
    portions = request.portions
    if not portions.are_equal:
        _refuse_unequal(request)
    most = _one(request.of_one(portions.most), gauge)
    others = tuple(
        replace(_fewer(request, most, number, gauge), portions=portions)
        for number in sorted({*portions.counts} - {portions.most})
    )
    return replace(most, portions=portions, others=others)


def _refuse_unequal(request: Request) -> None:
    """Refuse what replicas with unequal numbers of micro-batches cannot do."""
    if request.normalise_over_replicas:
        raise ConfigError(
            f"outer.weights: expected equal ones where BatchNorm normalises a micro-batch together "
            f"with those of the other replicas, got {list(request.combining.weights or ())}; use "
            f"normalise_over_replicas=false, or no weights"
        )
    if compares_placements(request):
        raise ConfigError(
            "outer.weights: expected one placement for all replicas, got schedule 'auto' with "
            "placement 'best', which chooses one for a number of micro-batches; choose a "
            "placement by name, or no weights"
        )


def _fewer(request: Request, most: Layout, microbatches: int, gauge: Gauge) -> Layout:
    """Lay out the replicas with fewer micro-batches: the same cut on the same ranks."""
    asked = replace(request.of_one(microbatches), partition=most.partition)
    try:
        found = _one(asked, gauge)
    except (ConfigError, ScheduleError) as error:
        raise type(error)(
            f"outer.weights: expected a table of {microbatches} micro-batch(es), which some "
            f"replicas are to run, got: {error}; use other weights, or more micro-batches"
        ) from error
    for stage in range(most.schedule.num_stages):
        held, holds = (each.schedule.placement.holders(stage) for each in (most, found))
        if held != holds:
            raise ScheduleError(
                f"outer.weights: schedule {found.schedule.name!r}: expected stage {stage} on the "
                f"same ranks in every replica, got {list(held)} with "
                f"{most.schedule.num_microbatches} micro-batches and {list(holds)} with "
                f"{microbatches}; use another schedule, or no weights"
            )
    return found


def _one(request: Request, gauge: Gauge) -> Layout:
    """Lay out one replica with `request.microbatches`."""
    partition, table, budget, searched = order(request, cut(request, gauge), gauge)
    for stage in range(table.num_stages):
        request.combining.check_copies(request.replicas * len(table.placement.holders(stage)))
    buckets = buckets_of(request, partition.counts, table.placement, gauge.layers)
    skips = long_skips(skip_routes(find_skips(gauge.layers), partition.counts))
    return Layout(
        partition,
        make_tables(
            table,
            "never" if budget else request.recompute,
            skips,
            request.offload,
            buckets,
            shard=request.combining.shard,
            is_apart=request.combining.uses_local_sgd and request.replicas > 1,
        ),
        budget.recomputed if budget else None,
        searched=searched,
        budget=budget.text if budget else "",
        shard=request.combining.shard,
    )


def lay_out_compute(request: Request, gauge: Gauge) -> Order:
    """Lay out one replica as `lay_out` does, but for communication and its checks.

    What a rank of the table computes, recomputes and offloads, and so holds, is what a rank of the
    whole lay-out does. For those who compare many lay-outs, and run few. Raises what `lay_out`
    raises for what cannot work, except what the checks of communication find.
    """
    found = order(request, cut(request, gauge), gauge)
    skips = long_skips(skip_routes(find_skips(gauge.layers), found.partition.counts))
    again = "never" if found.budget else request.recompute
    return found._replace(table=dressed(replace(found.table, skips=skips), again, request.offload))


def cut(request: Request, gauge: Gauge) -> Partition:
    """Make the cut of a layout, the only part for which a gauge may run layers.

    A request for that cut (`partition=`), or for the layout's own, gives the same layout. Raises
    what `lay_out` raises.
    """
    request = request.of_one(request.portions.most)
    given, pins = request.partition, read_pins(request.pins, gauge.layers)
    if compares_placements(request) and isinstance(given, Partition) and given.times:
        # Of whichever placement was the best: its times are what counts.
        return given._replace(pins=pins)
    stages, ranks, paces = stages_of(request), shared_by(request), paces_of(request)
    if isinstance(given, Partition) and given.made_on not in ("", place_name(request)):
        # Of a schedule whose ranks hold other stages: as fast a cut is looked for on this one.
        now = given._replace(paces=paces.stages, rank_paces=paces.ranks, pins=pins, is_open=True)
        return now.cut_anew(stages, ranks)
    return choose_partition(given, stages, gauge, ranks, paces, pins)
