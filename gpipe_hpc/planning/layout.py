"""Decide how a model is laid out: cut, table and recomputation."""

import hashlib
from dataclasses import dataclass

from gpipe_hpc.engine.stages.tables import Tables
from gpipe_hpc.models import find_skips, long_skips, skip_routes
from gpipe_hpc.planning.gauges import Gauge
from gpipe_hpc.planning.ordering import compares_placements, order, stages_of
from gpipe_hpc.planning.partition import Partition, choose_partition
from gpipe_hpc.planning.request import Request
from gpipe_hpc.planning.tables import make_tables
from gpipe_hpc.schedule import Schedule, digest


@dataclass(frozen=True)
class Layout:
    """All that is decided before a run: plain data, made once and sent to every rank.

    `partition` is the cut; placement, order of the work and what is offloaded stand in `tables`.
    `recomputed`: the layers of each stage that an ``R`` runs again, by their index; None for all.
    `replicas`: how many such pipelines run side by side. `searched` and `budget` say in words what
    was compared and chosen; they decide nothing.
    """

    partition: Partition
    tables: Tables
    recomputed: tuple[frozenset[int], ...] | None = None
    replicas: int = 1
    searched: str = ""
    budget: str = ""

    @property
    def schedule(self) -> Schedule:
        """Return the lowered table of a training step."""
        return self.tables.training

    def digest(self) -> str:
        """Return a hash of all that decides a run, the same in every process."""
        again = [sorted(layers) for layers in self.recomputed or ()]
        runs_all = self.recomputed is None
        decided = self.partition.counts, runs_all, again, self.replicas, *map(digest, self.tables)
        return hashlib.sha256(repr(decided).encode()).hexdigest()


def lay_out(request: Request, gauge: Gauge) -> Layout:
    """Lay out what is asked for, on `request.stages` ranks, by what a gauge says of the layers.

    The same request and the same figures give the same layout, whoever asks. Raises ConfigError,
    ModelError, PartitionError or ScheduleError for what cannot work.
    """
    partition, table, budget, searched = order(request, cut(request, gauge), gauge)
    skips = long_skips(skip_routes(find_skips(gauge.layers), partition.counts))
    return Layout(
        partition,
        make_tables(table, "never" if budget else request.recompute, skips, request.offload),
        budget.recomputed if budget else None,
        request.replicas,
        searched,
        budget.text if budget else "",
    )


def cut(request: Request, gauge: Gauge) -> Partition:
    """Make the cut of a layout, the only part for which a gauge may run layers.

    A request for that cut (`partition=`), or for the layout's own, gives the same layout. Raises
    what `lay_out` raises.
    """
    given = request.partition
    if compares_placements(request) and isinstance(given, Partition) and given.times:
        return given  # of whichever placement was the best: its times are what counts
    return choose_partition(given, stages_of(request), gauge)
