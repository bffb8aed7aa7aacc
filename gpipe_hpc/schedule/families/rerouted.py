"""Schedules for partial replicas: micro-batches of missing ranks run on ranks of other replicas."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.families.gpipe import gpipe
from gpipe_hpc.schedule.families.one_f_one_b import one_f_one_b
from gpipe_hpc.schedule.families.options import check_integer
from gpipe_hpc.schedule.families.orders import tabulate
from gpipe_hpc.schedule.families.zero_bubble import zb_h1
from gpipe_hpc.schedule.search.list_scheduling import Rules, list_schedule
from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.placements import with_holes
from gpipe_hpc.schedule.table.rows import Row
from gpipe_hpc.schedule.table.schedule import Placement, Schedule


def rerouted(
    ranks: int,
    microbatches: int,
    stages: int | None = None,
    order: str = "zb_h1",
    copies: Sequence[int] | None = None,
    room: int = 1,
    paces: Sequence[float] | None = None,
) -> Schedule:
    """Run pipelines of `stages` stages on any number of ranks; the last one may lack ranks.

    Two stages on three ranks; the second stage is held by one rank and has half as much work:

        rank 0 F0--F2--I0~~W0++I2~~W2++....
        rank 1 ....F0I0F1I1F2I2F3I3W0W1W2W3
        rank 2 F1--F3--....I1~~W1++I3~~W3++
        F- forward, I~ input gradient, W+ weight gradient, . idle;
        makespan 14, bubble 14.3% (idle over total)

    Each pipeline is a replica with one rank per stage; the last replica lacks some ranks.
    Micro-batches are assigned to replicas round-robin. If a replica lacks a stage, the ranks that
    hold the stage in other replicas run its micro-batches, divided evenly. `microbatches` counts
    those of all replicas. `copies` is the number of ranks that hold each stage; by default the last
    stages have fewer. All ranks are equally busy if the partition gives less work to stages with
    fewer copies. `paces` is the relative compute time of each rank: the ranks of a stage divide its
    micro-batches accordingly, and stages on slow ranks should get less work.

    `order` is the schedule of each replica: ``gpipe``, ``one_f_one_b`` or ``zb_h1``, whose split
    backwards let weight gradients fill idle time. A stage keeps as many micro-batches as those of
    complete replicas would, divided over its copies, plus `room` per rank if replicas are unequal:
    with C copies in R replicas of K stages, a rank of stage k keeps at most R (K - k) / C + room in
    ``one_f_one_b``, R K / C + room in ``zb_h1`` (rounded up), and all of its own in ``gpipe``. If
    ranks differ in pace, each keeps its share instead of 1 / C. In deep pipelines, more `room` lets
    the bubble absorb most of the imbalance; a quarter of K is a good value.
    Source: Gandhi et al., ReCycle, SOSP 2024 (arXiv 2405.14009): adaptive pipelining and decoupled
    back-propagation.
    """
    placement = in_rows(ranks, microbatches, stages, copies, paces)
    if order not in _ORDERS:
        raise ScheduleError(
            f"schedule 'rerouted': unknown order {order!r}, expected one of {', '.join(_ORDERS)}; "
            f"set pipeline.options.order"
        )
    slow = _unequal_paces(ranks, paces)
    if len(set(map(len, _held(placement)))) == 1 and not slow:
        return tabulate("rerouted", placement, _complete_replicas(placement, _NAMED[order]))
    return tabulate(
        "rerouted",
        placement,
        _ORDERS[order](placement, check_integer("rerouted", "room", room), slow),
    )


def in_rows(
    ranks: int,
    microbatches: int,
    stages: int | None,
    copies: Sequence[int] | None,
    paces: Sequence[float] | None = None,
) -> Placement:
    """Place stages on ranks in partial replicas.

    Args:
        stages: number of stages; None means one per rank.
        copies: number of ranks that hold each stage; None means as even as possible.
        paces: relative compute time of each rank; None means that all are equally fast.
    """
    num_stages = ranks if stages is None else check_integer("rerouted", "stages", stages)
    held = _copies(ranks, num_stages, copies)
    return with_holes(held, microbatches, _unequal_paces(ranks, paces))


def _unequal_paces(ranks: int, paces: Sequence[float] | None) -> Sequence[float]:
    """Return the checked relative compute time of each rank, or () if all are equal."""
    given = [] if paces is None else [*paces]
    are_paces = all(isinstance(each, int | float) and 0 < each < math.inf for each in given)
    if paces is not None and (len(given) != ranks or not are_paces):
        raise ScheduleError(
            f"schedule 'rerouted': paces must be the relative compute time of each of {ranks} "
            f"ranks, each above 0, got {given}; correct or remove pipeline.options.paces"
        )
    return given if len(set(given)) > 1 else ()


ORDERS: Final = ("gpipe", "one_f_one_b", "zb_h1")


def num_copies(ranks: int, stages: int) -> list[int]:
    """Divide ranks over stages as evenly as possible; the first stages get one more.

    Raises ScheduleError if there are fewer ranks than stages.
    """
    if ranks < stages:
        raise ScheduleError(
            f"schedule 'rerouted': {stages} stages need at least {stages} ranks, got {ranks}; use "
            f"fewer stages"
        )
    least, more = divmod(ranks, stages)
    return [least + (stage < more) for stage in range(stages)]


def _copies(ranks: int, stages: int, copies: Sequence[int] | None) -> Sequence[int]:
    """Return the number of ranks that hold each stage, as given or as even as possible."""
    if copies is None:
        return num_copies(ranks, stages)
    given = [check_integer("rerouted", "copies", each) for each in copies]
    if len(given) != stages or sum(given) != ranks:
        raise ScheduleError(
            f"schedule 'rerouted': copies must be the number of ranks of each of {stages} stages "
            f"and sum to {ranks} ranks, got {given}; correct or remove pipeline.options.copies"
        )
    return given


def _held(placement: Placement) -> list[tuple[int, ...]]:
    return [placement.holders(stage) for stage in range(placement.num_stages)]


def _complete_replicas(
    placement: Placement, named: Callable[[int, int], Schedule]
) -> list[list[Action]]:
    """Return the rows of a job without missing ranks: each replica runs the named schedule."""
    num_stages, columns = placement.num_stages, _held(placement)
    rows: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    for ranks in zip(*columns, strict=True):
        every = range(placement.num_microbatches)
        own = [m for m in every if placement.rank_of(0, m) == ranks[0]]
        if not own:
            continue
        for rank, row in zip(ranks, named(num_stages, len(own)).ranks, strict=True):
            rows[rank] = [action._replace(microbatch=own[action.microbatch or 0]) for action in row]
    return rows


def _fill_and_drain(placement: Placement, _: int, __: Sequence[float]) -> list[list[Action]]:
    """Run all forwards of each rank, then all backwards, last micro-batch first."""
    rows: list[list[Action]] = []
    for rank in range(placement.num_ranks):
        (stage,) = placement.stages_of(rank)
        own = [m for m in range(placement.num_microbatches) if placement.rank_of(stage, m) == rank]
        forwards = [Action(Op.F, stage, microbatch) for microbatch in own]
        rows.append(forwards + [Action(Op.B, stage, microbatch) for microbatch in reversed(own)])
    return rows


def _one_f_one_b(
    placement: Placement, room: int, paces: Sequence[float]
) -> Sequence[Sequence[Action]]:
    """Run each backward as soon as it is ready; later stages keep fewer micro-batches."""
    num_stages = placement.num_stages
    kept = [num_stages - stage for stage in range(num_stages)]
    return _listed(placement, (Op.B, Op.F), kept, room, paces)


def _zero_bubble(
    placement: Placement, room: int, paces: Sequence[float]
) -> Sequence[Sequence[Action]]:
    """Delay weight gradients until a rank has no other work or reaches its activation limit."""
    kept = [placement.num_stages] * placement.num_stages
    return _listed(placement, (Op.I, Op.F, Op.W), kept, room, paces)


def _listed(
    placement: Placement,
    order: tuple[Op, ...],
    kept_of_row: Sequence[int],
    room: int,
    paces: Sequence[float],
) -> list[Row]:
    """Build rows by list scheduling: a free rank runs the first op of `order` that is ready.

    Older micro-batches come first.

    Args:
        kept_of_row: for each stage, the micro-batches that a complete replica keeps at most.
        room: additional micro-batches that a rank may keep.
        paces: relative compute time of each rank, empty if equal.
    """
    stages = range(placement.num_stages)
    num_rows = max(len(placement.holders(stage)) for stage in stages)
    speeds = [1 / pace for pace in paces] or [1] * placement.num_ranks
    # Assumes a partition that gives all ranks equal work, given copies and speeds.
    work = [float(sum(speeds[rank] for rank in placement.holders(stage))) for stage in stages]
    limits = [0] * placement.num_ranks
    for stage in stages:
        for rank in placement.holders(stage):
            # With unequal replicas, micro-batches arrive unevenly and some must wait.
            share = num_rows * kept_of_row[stage] * speeds[rank] / work[stage]
            limits[rank] = math.ceil(share - 1e-9) + room
    rules = Rules(
        durations={op: [(2.0 if op is Op.B else 1.0) * each for each in work] for op in order},
        priority=lambda op, _, microbatch: (order.index(op), microbatch),
        transfers=[0.0] * placement.num_stages,
        limits=limits,
        paces=paces,
    )
    return list_schedule(placement, rules)


_NAMED: Final[Mapping[str, Callable[[int, int], Schedule]]] = MappingProxyType(
    dict(zip(ORDERS, (gpipe, one_f_one_b, zb_h1), strict=True))
)
_Ordered = Callable[[Placement, int, Sequence[float]], Sequence[Sequence[Action]]]
_ORDERS: Final[Mapping[str, _Ordered]] = MappingProxyType(
    dict(zip(ORDERS, (_fill_and_drain, _one_f_one_b, _zero_bubble), strict=True))
)
