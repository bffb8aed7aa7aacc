"""Decide the layout of a model: partition, schedule tables and recomputation."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gpipe_hpc.engine import Tables
from gpipe_hpc.errors import ConfigError, ScheduleError
from gpipe_hpc.models import (
    find_skips,
    long_skips,
    skip_routes,
)
from gpipe_hpc.planner.buckets import buckets_of
from gpipe_hpc.planner.costs.cost_models import CostModel
from gpipe_hpc.planner.cutting.partition import Partition, choose_partition
from gpipe_hpc.planner.cutting.pins import read_pins
from gpipe_hpc.planner.memory.sharing import OptimizerSharing
from gpipe_hpc.planner.ordering import (
    OrderedCut,
    compares_placements,
    order,
    paces_of,
    place_name,
    shared_by,
    stages_of,
)
from gpipe_hpc.planner.request import Request
from gpipe_hpc.planner.tables import make_tables, with_recompute_and_offload
from gpipe_hpc.schedule import Row, Schedule, digest, with_row, without_rows
from gpipe_hpc.settings import MicrobatchSplit


@dataclass(frozen=True)
class Layout:
    """All decisions made before a run, as plain data, computed once on rank 0.

    Other ranks receive it with only their own rows of the schedule tables, see `broadcast_layout`.

    Attributes:
      partition: the assignment of layers to stages.
      tables: placement, order of actions and offloading.
      recomputed: for each stage, the indices of the layers that ``R`` recomputes; None: all layers.
      portions: number of micro-batches of each replica. `partition`, `tables` and `recomputed` are
        those of the replicas with the most micro-batches.
      others: layouts of replicas with fewer micro-batches.
      shard: as in `Outer`.
      searched, budget: descriptions of the schedule search and of the recomputation, for messages.
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
    def sharing(self) -> OptimizerSharing | None:
        """Return how replicas shard the optimizer state, or None if each keeps all of it."""
        return OptimizerSharing.of(self.shard, self.portions.num_replicas, self.tables.buckets)

    @property
    def schedule(self) -> Schedule:
        """Return the lowered schedule table of a training step."""
        return self.tables.training

    @property
    def replicas(self) -> int:
        """Return the number of replicas."""
        return self.portions.num_replicas

    def of(self, replica: int) -> "Layout":
        """Return the layout of one replica, with its own tables and recomputation."""
        count = len(self.portions.of(replica))
        return next(e for e in (self, *self.others) if e.schedule.num_microbatches == count)

    def rows(self, rank: int) -> list[Row]:
        """Return the actions of a rank in every schedule table of this layout and of `others`."""
        own = [table.rows[rank] for table in self.tables.schedules]
        return own + [row for each in self.others for row in each.rows(rank)]

    def without_rows(self) -> "Layout":
        """Return a copy in which each rank's row of actions is replaced by its digest."""
        tables = self.tables.with_schedules([*map(without_rows, self.tables.schedules)])
        return replace(self, tables=tables, others=tuple(e.without_rows() for e in self.others))

    def with_rows(self, rank: int, rows: Sequence[Row]) -> "Layout":
        """Return a copy that contains one rank's rows of actions.

        Raises ScheduleError if their digests differ from the stored ones.
        """
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
        """Return a hash of all decisions that affect the run; equal layouts have equal hashes."""
        again = [sorted(layers) for layers in self.recomputed or ()]
        runs_all = self.recomputed is None
        tables = [digest(table) for table in self.tables.schedules], self.tables.buckets
        others = [each.digest() for each in self.others]
        decided = self.partition.counts, runs_all, again, self.portions, others, *tables
        return hashlib.sha256(repr(decided).encode()).hexdigest()


def lay_out(request: Request, cost_model: CostModel) -> Layout:
    """Compute the layout of a request on `request.stages` ranks, with costs from `cost_model`.

    Deterministic: equal requests and costs give equal layouts. Raises ConfigError, ModelError,
    PartitionError or ScheduleError for impossible requests.
    """
    portions = request.portions
    if not portions.are_equal:
        _refuse_unequal(request)
    most = _one(request.of_one(portions.most), cost_model)
    others = tuple(
        replace(_fewer(request, most, number, cost_model), portions=portions)
        for number in sorted({*portions.counts} - {portions.most})
    )
    return replace(most, portions=portions, others=others)


def _refuse_unequal(request: Request) -> None:
    """Raise ConfigError for settings that do not allow unequal numbers of micro-batches."""
    if request.normalise_over_replicas:
        raise ConfigError(
            f"outer.weights: normalise_over_replicas needs equal weights, because BatchNorm pools "
            f"the micro-batches of all replicas; got {list(request.combining.weights or ())}; set "
            f"normalise_over_replicas=false, or remove outer.weights"
        )
    if compares_placements(request):
        raise ConfigError(
            "outer.weights: all replicas need one placement, but schedule 'auto' with placement "
            "'best' chooses it by the number of micro-batches; set a placement by name, or remove "
            "outer.weights"
        )


def _fewer(request: Request, most: Layout, microbatches: int, cost_model: CostModel) -> Layout:
    """Lay out replicas with fewer micro-batches, with the partition and placement of `most`."""
    asked = replace(request.of_one(microbatches), partition=most.partition)
    try:
        found = _one(asked, cost_model)
    except (ConfigError, ScheduleError) as error:
        raise type(error)(
            f"outer.weights: some replicas get {microbatches} micro-batch(es), with which the "
            f"schedule does not work: {error}; use other weights, or more micro-batches"
        ) from error
    for stage in range(most.schedule.num_stages):
        held, holds = (each.schedule.placement.holders(stage) for each in (most, found))
        if held != holds:
            raise ScheduleError(
                f"outer.weights: schedule {found.schedule.name!r} places stage {stage} on ranks "
                f"{list(held)} with {most.schedule.num_microbatches} micro-batches, but on "
                f"{list(holds)} with {microbatches}; use another schedule, or remove outer.weights"
            )
    return found


def _one(request: Request, cost_model: CostModel) -> Layout:
    """Lay out one replica with `request.microbatches` micro-batches."""
    partition, table, budget, searched = order(request, cut(request, cost_model), cost_model)
    for stage in range(table.num_stages):
        request.combining.check_copies(request.replicas * len(table.placement.holders(stage)))
    buckets = buckets_of(request, partition.counts, table.placement, cost_model.layers)
    skips = long_skips(skip_routes(find_skips(cost_model.layers), partition.counts))
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


def lay_out_compute(request: Request, cost_model: CostModel) -> OrderedCut:
    """Lay out one replica without communication, to compare many layouts of which few are run.

    Compute, recomputation, offloading and memory of each rank equal those of `lay_out`. Raises the
    errors of `lay_out`, except those of communication.
    """
    found = order(request, cut(request, cost_model), cost_model)
    skips = long_skips(skip_routes(find_skips(cost_model.layers), found.partition.counts))
    again = "never" if found.budget else request.recompute
    return found._replace(
        table=with_recompute_and_offload(replace(found.table, skips=skips), again, request.offload)
    )


def cut(request: Request, cost_model: CostModel) -> Partition:
    """Partition the model as `lay_out` would; only this part of a layout may run layers.

    A request with this partition gives the same layout. Raises the errors of `lay_out`.
    """
    request = request.of_one(request.portions.most)
    given, pins = request.partition, read_pins(request.pins, cost_model.layers)
    if compares_placements(request) and isinstance(given, Partition) and given.times:
        # The best placement may differ now, so only the times of the partition are used.
        return given._replace(pins=pins)
    stages, ranks, paces = stages_of(request), shared_by(request), paces_of(request)
    if isinstance(given, Partition) and given.made_on not in ("", place_name(request)):
        # Made for a schedule with another placement: search a fast partition for this one.
        now = given._replace(paces=paces.stages, rank_paces=paces.ranks, pins=pins, is_open=True)
        return now.cut_anew(stages, ranks)
    return choose_partition(given, stages, cost_model, ranks, paces, pins)
