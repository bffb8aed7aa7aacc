"""Schedule ``auto``: an action order found for given costs by list scheduling and local search."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import groupby
from typing import Any, Final, NamedTuple

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.costs import Costs, per_stage
from gpipe_hpc.schedule.families.known import FAMILIES
from gpipe_hpc.schedule.families.options import check_integer
from gpipe_hpc.schedule.families.orders import tabulate
from gpipe_hpc.schedule.families.rerouted import ORDERS, in_rows
from gpipe_hpc.schedule.memory import Memory, peak_memory
from gpipe_hpc.schedule.search.bounds import lower_bound
from gpipe_hpc.schedule.search.join import join_backwards
from gpipe_hpc.schedule.search.list_scheduling import Priority, Rules, list_schedule
from gpipe_hpc.schedule.search.local_search import improve
from gpipe_hpc.schedule.simulator import simulate
from gpipe_hpc.schedule.table.actions import Op
from gpipe_hpc.schedule.table.lifetimes import bounds_of
from gpipe_hpc.schedule.table.placements import copies_in_rows, looped, mirrored, wave
from gpipe_hpc.schedule.table.schedule import Placement, Schedule, Skip


@dataclass(frozen=True)
class AutoResult:
    """Result of a search: a table, its simulated step time, and reference times.

    Attributes:
        makespan: simulated step time of the table.
        lower_bound: step time that no order of the placement can beat.
        best_named: fastest named schedule on the placement, or None if none fits.
        best_named_makespan: its simulated step time, or None.
    """

    schedule: Schedule
    makespan: float
    lower_bound: float
    best_named: str | None
    best_named_makespan: float | None

    @property
    def gap(self) -> float:
        """Return the excess of the table's time over the lower bound, as a share of the bound."""
        return max(0.0, self.makespan / self.lower_bound - 1.0) if self.lower_bound > 0 else 0.0


class MemoryAllowance(NamedTuple):
    """Memory limits of the ranks; if no order fits, the search exceeds them as little as possible.

    Args:
        memory: memory of each op.
        limits: one limit per rank, in the unit of `memory`.
        dressed: function that adds to a compute-only table the recomputation and offloading of the
            run.
    """

    memory: Memory
    limits: Sequence[float]
    dressed: Callable[[Schedule], Schedule]

    def excess(self, schedule: Schedule) -> float:
        """Return the largest amount by which a rank exceeds its limit, 0 if none does."""
        peaks = peak_memory(self.dressed(schedule), self.memory)
        return max(0.0, *(peak - most for peak, most in zip(peaks, self.limits, strict=True)))


def auto(
    ranks: int,
    microbatches: int,
    costs: Costs | Mapping[str, Any] | None = None,
    limit: float | Sequence[float] | None = None,
    placement: str = "one_each",
    stages_per_rank: int = 2,
    stages: int | None = None,
    copies: Sequence[int] | None = None,
    trials: int = 200,
    within: Callable[[Placement], MemoryAllowance] | None = None,
) -> Schedule:
    """Search an action order for given costs under a memory limit; see `search`.

    The result is no slower, in simulation, than any named schedule on the same placement and under
    the same limit.

    Args:
        ranks: number of ranks.
        microbatches: number of micro-batches per step.
        costs: keywords of `Costs`; default F = I = W.
        limit: largest number of (stage, micro-batch) pairs a rank keeps, one number or one per
            rank.
        placement: ``one_each``, ``looped`` or ``wave`` (both with `stages_per_rank`), ``mirrored``,
            or ``rerouted`` (with `stages` and `copies` as in `rerouted`).
        trials: number of simulated changes to try.
        within: function from the placement to memory limits of the ranks. Set by the planner, not
            an option for users.
    """
    if not isinstance(costs, Costs):
        costs = _named_costs(costs or {"forward": 1, "input_gradient": 1, "weight_gradient": 1})
    slow = costs.of_paces(ranks)
    where = place(placement, ranks, microbatches, stages_per_rank, stages, copies, slow)
    check_integer("auto", "trials", trials, least=0)
    bound = None if within is None else within(where)
    return search(where, costs, limit=limit, trials=trials, within=bound).schedule


def _named_costs(costs: Mapping[str, Any]) -> Costs:
    known = [field.name for field in fields(Costs)]
    for name in costs:
        if name not in known:
            raise ScheduleError(
                f"schedule 'auto': unknown cost {name!r}, expected some of {', '.join(known)}; "
                f"correct pipeline.options.costs"
            )
    return Costs(**costs)


def place(
    kind: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int = 2,
    stages: int | None = None,
    copies: Sequence[int] | None = None,
    paces: Sequence[float] | None = None,
) -> Placement:
    """Return the placement with a given name: one_each, looped, wave, mirrored or rerouted.

    `stages`, `copies` and `paces` (relative compute time of each rank) are for ``rerouted`` only.
    Raises ScheduleError for unknown names and invalid options.
    """
    if kind == "rerouted":
        return in_rows(ranks, microbatches, stages, copies, paces)
    if stages is not None or copies is not None:
        raise ScheduleError(
            f"schedule 'auto': the options stages and copies need placement rerouted, got "
            f"{kind!r}; remove them"
        )
    count = check_integer("auto", "stages_per_rank", stages_per_rank)
    if kind == "one_each":
        return looped(ranks, 1, microbatches)
    if kind == "looped":
        return looped(ranks, count, microbatches)
    if kind == "wave" and count % 2 == 0:
        return wave(ranks, count // 2, microbatches)
    if kind == "mirrored":
        return mirrored(ranks, 2, [index % 2 for index in range(microbatches)])
    raise ScheduleError(
        "schedule 'auto': placement must be one_each, looped, mirrored, rerouted, or wave with an "
        f"even stages_per_rank (or, for measured layers, best), got {kind!r} with stages_per_rank="
        f"{stages_per_rank}; set pipeline.options.placement or pipeline.options.stages_per_rank"
    )


def search(
    placement: Placement,
    costs: Costs,
    *,
    limit: float | Sequence[float] | None = None,
    memory: Memory | None = None,
    trials: int = 200,
    skips: tuple[Skip, ...] = (),
    within: MemoryAllowance | None = None,
) -> AutoResult:
    """Search a fast order of the actions of a placement under given costs.

    Starting points are named schedules and list schedules with several priorities. The best few are
    improved by up to `trials` swaps and as many attempts to join halves of backwards. Backwards are
    split only if the costs of both halves are given and only if that saves time.

    Args:
        placement: ranks of the stages.
        costs: durations of the actions.
        limit: largest memory of a rank, in micro-batches of a stage or in the unit of `memory`; one
            number or one per rank.
        memory: memory of each op; default: every micro-batch of a stage counts as one.
        trials: number of simulated changes to try.
        skips: pairs of stages whose transfers are simulated too.
        within: a further limit, exceeded only if no order fits.

    Raises:
        ScheduleError: no order stays within `limit`.
    """
    room = _AllowanceCheck(placement, memory or Memory(), limit, within)
    may_split = costs.input_gradient is not None and costs.weight_gradient is not None
    tables = (
        [replace(table, skips=skips) for table in each]
        for each in (
            _named(placement, may_split, costs.of_paces(placement.num_ranks)),
            _listed(placement, costs, may_split, room),
        )
    )
    found = [[table for table in each if room.fits_limit(table)] for each in tables]
    if within is not None:
        room.bear(min((within.excess(table) for each in found for table in each), default=0.0))
    named, listed = (list(_timed(iter(each), costs, room)) for each in found)
    if not named and not listed:
        raise ScheduleError(
            f"schedule 'auto': no order stays within the limit {limit}; raise it to at least one "
            f"micro-batch for each stage of a rank"
        )
    # Sending an output without waiting for the overlapped backward is never slower.
    apart = [(time, replace(schedule, overlaps=())) for time, schedule in named]
    started = sorted(apart + listed, key=_speed_then_memory)[:_NUM_IMPROVED]
    if may_split:
        # Start also from tables made as if splitting were free: a few splits may pay off.
        free = _costs_with_free_splits(costs, placement.num_stages)
        timed = ((simulate(each, free).makespan, each) for _, each in apart + listed)
        started += sorted(timed, key=_speed_then_memory)[:_NUM_IMPROVED]
    best = min(
        (_finish(schedule, costs, room, trials) for _, schedule in started),
        key=lambda schedule: simulate(schedule, costs).makespan,
    )
    fastest = min(named, key=lambda pair: pair[0], default=None)
    return AutoResult(
        schedule=replace(best, name="auto", max_activations=bounds_of(best.ranks)),
        makespan=simulate(best, costs).makespan,
        lower_bound=lower_bound(placement, costs, may_split),
        best_named=fastest[1].name if fastest else None,
        best_named_makespan=fastest[0] if fastest else None,
    )


_NUM_IMPROVED: Final = 3


def _costs_with_free_splits(costs: Costs, num_stages: int) -> Costs:
    """Return costs with ``I`` and ``W`` scaled so that they take no longer than ``B``."""
    whole_s, inputs, weights = (costs.of_compute(op, num_stages) for op in (Op.B, Op.I, Op.W))
    shares = [
        min(1.0, b / (i + w)) if i + w else 1.0
        for b, i, w in zip(whole_s, inputs, weights, strict=True)
    ]
    return replace(
        costs,
        input_gradient=[i * share for i, share in zip(inputs, shares, strict=True)],
        weight_gradient=[w * share for w, share in zip(weights, shares, strict=True)],
    )


def _speed_then_memory(timed: tuple[float, Schedule]) -> tuple[float, int]:
    makespan, schedule = timed
    return makespan, sum(schedule.max_activations or ())


class _AllowanceCheck:
    """Memory limits of a search, and checks of tables against them."""

    def __init__(
        self,
        placement: Placement,
        memory: Memory,
        limit: float | Sequence[float] | None,
        within: MemoryAllowance | None = None,
    ) -> None:
        num_ranks = placement.num_ranks
        limits = [limit] * num_ranks if isinstance(limit, int | float) else limit
        if limits is not None and len(limits) != num_ranks:
            raise ScheduleError(
                f"schedule 'auto': limit must be one number or one for each of {num_ranks} ranks, "
                f"got {len(limits)} numbers"
            )
        self.limits = None if limits is None else [float(one) for one in limits]
        self.memory = memory
        self.within = within
        self._borne = 0.0

    def bear(self, excess: float) -> None:
        """Allow ranks to exceed `within` by the smallest excess among the starting tables."""
        self._borne = excess

    def fits(self, schedule: Schedule) -> bool:
        """Return whether no rank exceeds `limit`, nor exceeds `within` by more than allowed."""
        if self.within is not None and self.within.excess(schedule) > self._borne:
            return False
        return self.fits_limit(schedule)

    def fits_limit(self, schedule: Schedule) -> bool:
        """Return whether no rank exceeds `limit`."""
        if self.limits is None:
            return True
        peaks = peak_memory(schedule, self.memory)
        return all(peak <= most + 1e-9 for peak, most in zip(peaks, self.limits, strict=True))

    def counts(self, placement: Placement) -> list[int] | None:
        """Return how many (stage, micro-batch) pairs fit on each rank; None if unlimited."""
        if self.limits is None:
            return None
        num_stages = placement.num_stages
        kept = per_stage("forward", self.memory.forward, num_stages)
        weights = per_stage("weights", self.memory.weights, num_stages)
        counts: list[int] = []
        for rank, most in enumerate(self.limits):
            stages = placement.stages_of(rank)
            left = most - sum(weights[stage] for stage in stages)
            dearest = max((kept[stage] for stage in stages), default=0.0)
            unbounded = len(stages) * placement.num_microbatches
            counts.append(min(unbounded, int(left / dearest + 1e-9)) if dearest else unbounded)
        return counts


def _timed(
    schedules: Iterator[Schedule], costs: Costs, room: _AllowanceCheck
) -> Iterator[tuple[float, Schedule]]:
    """Yield those tables that fit into memory, each with its simulated step time."""
    for schedule in schedules:
        if room.fits(schedule):
            yield simulate(schedule, costs).makespan, schedule


def _named(placement: Placement, may_split: bool, paces: Sequence[float]) -> Iterator[Schedule]:
    """Yield the named schedules that have a placement, with split backwards only if allowed.

    Their options follow from the placement: stages per rank, routes, and the number of consecutive
    micro-batches on the same route.
    """
    ranks, microbatches = placement.num_ranks, placement.num_microbatches
    each = max(1, placement.num_stages // ranks)
    pipelines = len(placement.routes)
    passes = len(list(groupby(placement.route_of)))
    tried: dict[str, list[dict[str, Any]]] = {
        "gems": [{}, {"replications": max(1, passes // 2)}],
        "chimera": [
            {"pipelines": pipelines},
            {"pipelines": pipelines, "scaling": "forward_doubling"},
        ],
        "looped_bfs": [{"stages_per_rank": each}],
        "interleaved": [{"stages_per_rank": each}],
        "hanayo": [{"waves": max(1, each // 2)}],
        "rerouted": list(_in_rows(placement, paces)),
    }
    makers = [
        partial(family, **options)
        for name, family in FAMILIES.items()
        for options in tried.get(name, [{}])
    ]
    for make in makers:
        try:
            schedule = make(ranks, microbatches)
        except ScheduleError:
            continue  # the schedule does not support these numbers
        splits = any(action.op is Op.I for row in schedule.ranks for action in row)
        if schedule.placement == placement and (may_split or not splits):
            yield schedule


def _in_rows(placement: Placement, paces: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yield the options of ``rerouted`` for a placement with partial replicas."""
    copies = copies_in_rows(placement)
    if copies is not None:
        rows = {"stages": len(copies), "copies": copies, "paces": paces}
        yield from ({**rows, "order": order} for order in ORDERS)


def _listed(
    placement: Placement, costs: Costs, may_split: bool, room: _AllowanceCheck
) -> Iterator[Schedule]:
    """Yield list schedules with full and split backwards, several priorities and several limits."""
    num_stages = placement.num_stages
    most = room.counts(placement)
    boundaries = costs.transfer_times(num_stages)
    route = placement.routes[0]
    transfers = [
        boundaries(stage, (route[stage], route[min(stage + 1, num_stages - 1)]))
        for stage in range(num_stages)
    ]
    paces = costs.of_paces(placement.num_ranks)
    orders: list[tuple[Op, ...]] = [(Op.B, Op.F), (Op.F, Op.B)]
    if may_split:
        orders += [(Op.I, Op.F, Op.W), (Op.F, Op.I, Op.W), (Op.I, Op.W, Op.F)]
    for order in orders:
        durations = {op: costs.of_compute(op, num_stages) for op in order}
        for priority in (_deepest_first(order), _oldest_first(order)):
            for limits in _limits(placement, most, is_tight=room.within is not None):
                try:
                    rules = Rules(durations, priority, transfers, limits, paces)
                    rows = list_schedule(placement, rules)
                except ScheduleError:
                    continue  # the limit is too small for this priority
                yield tabulate("auto", placement, rows)


def _limits(
    placement: Placement, most: list[int] | None, *, is_tight: bool
) -> list[list[int] | None]:
    """Return activation limits to try: the given one, one full pipeline, and two.

    If memory is tight, also lower limits, down to one micro-batch in each stage of a rank.
    """
    tried: list[list[int] | None] = [most]
    num_ranks = placement.num_ranks
    bounds = [[depth * placement.num_stages] * num_ranks for depth in (1, 2)]
    if is_tight:
        held = [len(placement.stages_of(rank)) for rank in range(num_ranks)]
        depth = 1
        while depth < placement.num_stages:
            bounds.append([max(1, depth * each) for each in held])
            # As in 1F1B: earlier ranks keep more micro-batches.
            bounds.append(
                [max(1, min(depth, num_ranks - rank) * each) for rank, each in enumerate(held)]
            )
            depth *= 2
    for full in bounds:
        lower = full if most is None else [min(pair) for pair in zip(full, most, strict=True)]
        if lower not in tried:
            tried.append(lower)
    return tried


def _deepest_first(order: tuple[Op, ...]) -> Priority:
    """Return a priority function: sort by op, then by the stage closest to the end of its pass."""

    def key(op: Op, stage: int, microbatch: int) -> tuple[int, ...]:
        return order.index(op), -stage if op is Op.F else stage, microbatch

    return key


def _oldest_first(order: tuple[Op, ...]) -> Priority:
    """Return a priority function: sort by op, then by micro-batch."""
    return lambda op, stage, microbatch: (order.index(op), microbatch, stage)


def _finish(schedule: Schedule, costs: Costs, room: _AllowanceCheck, trials: int) -> Schedule:
    """Improve a table by swaps, then join ``I`` and ``W`` if that does not slow it down."""
    improved = improve(schedule, costs, room.fits, trials)
    return join_backwards(improved, costs, room.fits, trials)
