"""Pipelines side by side with holes: a missing rank's micro-batches go to its peers."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.families.gpipe import gpipe
from gpipe_hpc.schedule.families.one_f_one_b import one_f_one_b
from gpipe_hpc.schedule.families.options import whole
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
    """Run pipelines of `stages` on any number of ranks, those of the last one not all there.

    Two stages on three ranks, the second of which is held once and has half as much to do:

        rank 0 F0--F2--I0~~W0++I2~~W2++....
        rank 1 ....F0I0F1I1F2I2F3I3W0W1W2W3
        rank 2 F1--F3--....I1~~W1++I3~~W3++
        F- forward, I~ input gradient, W+ weight gradient, . idle;
        makespan 14, bubble 14.3% (idle over total)

    Each pipeline is a row of ranks, one for each stage; the last row has holes. Micro-batches take
    the rows in turn. Where a row has a hole the ranks that hold the same stage in other rows take
    its micro-batches, evenly. `microbatches` counts those of all rows. `copies` says how many ranks
    hold each stage; without it the last stages have fewer. A cut that gives a stage with fewer
    copies less work keeps all ranks equally busy. `paces` says how many times as long each rank
    takes: those of a stage share its micro-batches accordingly, and a stage of slow ranks is to
    have less work.

    `order` is that of each row: ``gpipe``, ``one_f_one_b`` or ``zb_h1``, whose backwards are split
    so that weight gradients fill what the others leave idle. A stage keeps as many micro-batches as
    those of whole rows would, shared by its copies, and `room` more on a rank where some rows have
    holes: with C copies in R rows of K stages, stage k has at most R (K - k) / C + room on a rank
    in ``one_f_one_b``, R K / C + room in ``zb_h1`` (rounded up), and all of a rank's in ``gpipe``.
    Of ranks of unequal paces each keeps its share of that, not 1 / C.
    In deep pipelines more room lets the bubble take in what the holes leave: a quarter of K more
    makes up for most of them.
    Source: Gandhi et al., ReCycle, SOSP 2024 (arXiv 2405.14009): adaptive pipelining and decoupled
    back-propagation.
    """
    placement = in_rows(ranks, microbatches, stages, copies, paces)
    if order not in _ORDERS:
        raise ScheduleError(
            f"schedule 'rerouted': unknown order, expected one of {', '.join(_ORDERS)}, "
            f"got {order!r}; choose one of them"
        )
    slow = _slow(ranks, paces)
    if len(set(map(len, _held(placement)))) == 1 and not slow:
        return tabulate("rerouted", placement, _whole_rows(placement, _NAMED[order]))
    return tabulate(
        "rerouted",
        placement,
        _ORDERS[order](placement, whole("rerouted", "room", room), slow),
    )


def in_rows(
    ranks: int,
    microbatches: int,
    stages: int | None,
    copies: Sequence[int] | None,
    paces: Sequence[float] | None = None,
) -> Placement:
    """Place stages in rows of ranks; None: as many stages as ranks, as even copies as can be.

    `paces`: how many times as long each rank takes; None: all are equally fast.
    """
    num_stages = ranks if stages is None else whole("rerouted", "stages", stages)
    held = _copies(ranks, num_stages, copies)
    return with_holes(held, microbatches, _slow(ranks, paces))


def _slow(ranks: int, paces: Sequence[float] | None) -> Sequence[float]:
    """Return how many times as long each rank takes, where some take longer; refuse others."""
    given = [] if paces is None else [*paces]
    are_paces = all(isinstance(each, int | float) and 0 < each < math.inf for each in given)
    if paces is not None and (len(given) != ranks or not are_paces):
        raise ScheduleError(
            f"schedule 'rerouted': paces has how many times as long each rank takes, expected a "
            f"number above 0 for each of {ranks} ranks, got {given}; correct them, or leave them "
            f"out"
        )
    return given if len(set(given)) > 1 else ()


ORDERS: Final = ("gpipe", "one_f_one_b", "zb_h1")


def num_copies(ranks: int, stages: int) -> list[int]:
    """Return how many ranks hold each stage where all differ by one at most, the last have fewer.

    Raises ScheduleError for fewer ranks than stages.
    """
    if ranks < stages:
        raise ScheduleError(
            f"schedule 'rerouted': expected a rank for each of {stages} stages at least, got "
            f"{ranks} rank(s); use fewer stages"
        )
    least, more = divmod(ranks, stages)
    return [least + (stage < more) for stage in range(stages)]


def _copies(ranks: int, stages: int, copies: Sequence[int] | None) -> Sequence[int]:
    """Return how many ranks hold each stage, as given or as even as can be; refuse others."""
    if copies is None:
        return num_copies(ranks, stages)
    given = [whole("rerouted", "copies", each) for each in copies]
    if len(given) != stages or sum(given) != ranks:
        raise ScheduleError(
            f"schedule 'rerouted': copies has how many ranks hold each stage, expected {stages} "
            f"numbers that add up to {ranks} ranks, got {given}; correct them, or leave them out"
        )
    return given


def _held(placement: Placement) -> list[tuple[int, ...]]:
    return [placement.holders(stage) for stage in range(placement.num_stages)]


def _whole_rows(placement: Placement, named: Callable[[int, int], Schedule]) -> list[list[Action]]:
    """Let each row without a hole run its micro-batches as the schedule known by name does."""
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
    """Let each rank run all its forwards, then all its backwards, the last micro-batch first."""
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
    """Run a backward as soon as there is one; the later a stage, the fewer micro-batches live."""
    num_stages = placement.num_stages
    kept = [num_stages - stage for stage in range(num_stages)]
    return _listed(placement, (Op.B, Op.F), kept, room, paces)


def _zero_bubble(
    placement: Placement, room: int, paces: Sequence[float]
) -> Sequence[Sequence[Action]]:
    """Let weight gradients wait until a rank has nothing else to do, or no room."""
    kept = [placement.num_stages] * placement.num_stages
    return _listed(placement, (Op.I, Op.F, Op.W), kept, room, paces)


def _listed(
    placement: Placement,
    order: tuple[Op, ...],
    kept_of_row: Sequence[int],
    room: int,
    paces: Sequence[float],
) -> list[Row]:
    """Let each rank start the first op of an order that is ready; of one op the oldest.

    `kept_of_row`: the micro-batches that a stage of a row without holes keeps at most; `room`: how
    many more where rows are unequal; `paces`: how many times as long ranks take, if not all alike.
    """
    stages = range(placement.num_stages)
    num_rows = max(len(placement.holders(stage)) for stage in stages)
    speeds = [1 / pace for pace in paces] or [1] * placement.num_ranks
    # A cut that knows the copies, and how fast they are, gives each rank as much to do.
    work = [float(sum(speeds[rank] for rank in placement.holders(stage))) for stage in stages]
    limits = [0] * placement.num_ranks
    for stage in stages:
        for rank in placement.holders(stage):
            # Where rows are unequal micro-batches come unevenly, and some wait.
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
