"""The order of the work on a cut: a schedule known by name, or one that is searched."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from gpipe_hpc.errors import ConfigError, GpipeError, PartitionError, ScheduleError
from gpipe_hpc.planner.buckets import sharing_of
from gpipe_hpc.planner.budget.fitting import Budget, choose_recompute
from gpipe_hpc.planner.costs.gauges import Gauge
from gpipe_hpc.planner.cutting.partition import ALIKE, SIMULATED, Paces, Partition
from gpipe_hpc.planner.cutting.pins import Ends
from gpipe_hpc.planner.cutting.roomier import lacks_memory, roomier_cut
from gpipe_hpc.planner.cutting.simulated import faster_cut, has_shared_ranks
from gpipe_hpc.planner.forecast import activation_memory, flop_costs, held_bytes, rank_states
from gpipe_hpc.planner.memory.by_rank import excess_bytes, given_paces, memory_limits
from gpipe_hpc.planner.request import Request
from gpipe_hpc.planner.stages import count_stages
from gpipe_hpc.planner.tables import dressed, recomputes, table_asked_for
from gpipe_hpc.schedule import (
    Costs,
    Placement,
    Schedule,
    Within,
    build,
    num_stages,
    place,
    simulate,
)
from gpipe_hpc.units import bytes_text, flops_text


class Order(NamedTuple):
    """A cut and a table without communication for it.

    `budget`: what is recomputed, where that was chosen by memory; the table then has its R.
    `searched` says in words what was compared.
    """

    partition: Partition
    table: Schedule
    budget: Budget | None = None
    searched: str = ""


def order(request: Request, partition: Partition, gauge: Gauge) -> Order:
    """Order the work of a cut as a request asks for; `auto` searches, within the memory if given.

    Where some rank has too little memory for the cut, and another cut gives each enough, that is
    taken. Raises ConfigError, ModelError, PartitionError or ScheduleError for what cannot work.
    """
    if compares_placements(request):
        return _best_placement(request, partition, gauge)
    if memory_limits(request) is None:
        return _on_cut(request, partition, gauge)
    try:
        found = _on_cut(request, partition, gauge)
    except PartitionError:  # with no recomputation that a budget may choose
        roomier = roomier_cut(request, partition, _thrifty(request), gauge)
        if roomier is None:
            raise
        return _on_cut(request, roomier, gauge)
    if request.recompute == "budget" or not lacks_memory(request, partition, found.table, gauge):
        return found
    roomier = roomier_cut(request, partition, found.table, gauge)
    return found if roomier is None else _on_cut(request, roomier, gauge)


def _thrifty(request: Request) -> Schedule:
    """Return the table asked for, and in the place of one to be searched that which keeps least."""
    if request.schedule != "auto":
        return table_of(request)
    return build("one_f_one_b", ranks=ranks_of(request), microbatches=request.microbatches)


def _on_cut(request: Request, partition: Partition, gauge: Gauge) -> Order:
    """Order the work of a cut, or of a faster one where that is open."""
    found = _on_this_cut(request, partition, gauge)
    return _settled(request, found, gauge, partial(_on_this_cut, request, gauge=gauge))


_MOST_SIMULATED: Final = 100_000  # actions of tables, in the search of a cut: half a second


def _settled(
    request: Request, found: Order, gauge: Gauge, order_of: Callable[[Partition], Order]
) -> Order:
    """Return the order on the fastest cut that is found for its table, where its cut is open.

    That cut is for ranks that hold several stages, simulated with free transfers. `order_of` orders
    the work of a cut; a cut that fits into memory stays where the faster one does not.
    """
    before = found.partition
    table = found.table
    settled = found._replace(partition=before._replace(is_open=False))
    is_open = before.is_open and before.num_ranks is None
    if not is_open or not has_shared_ranks(table.placement):
        return settled
    judge = _smaller(request, table if found.budget else dressed(table, request.recompute, False))

    def time_of(cut: Partition) -> float:
        costs = cut.stage_costs()
        assert costs is not None, "the times are known"
        return simulate(judge, costs).makespan

    most = _MOST_SIMULATED // max(1, judge.num_actions)
    faster = faster_cut(before, table.placement, time_of, most)
    if faster is before:
        return settled
    try:
        other = order_of(faster._replace(is_open=False, made_on=place_name(request)))
    except PartitionError:  # with no recomputation that a budget may choose
        return settled
    if memory_limits(request) is not None and request.recompute != "budget":
        lacks = lacks_memory(request, faster, other.table, gauge)
        if lacks and not lacks_memory(request, before, table, gauge):
            return settled
    return other if _time_of(other, gauge) < _time_of(settled, gauge) else settled


def is_simulated(request: Request, kept: Partition) -> bool:
    """Say whether a cut was, or may be, chosen by simulating: one for other costs may be, too."""
    return request.partition == SIMULATED or bool(kept.made_on)


def place_name(request: Request) -> str:
    """Return what tells on which ranks the stages are: the schedule, its options, and the ranks."""
    name = request.schedule if isinstance(request.schedule, str) else request.schedule.name
    options = {n: o for n, o in request.options.items() if isinstance(o, str | int | float)}
    return " ".join(
        [name, f"{request.stages} ranks", *(f"{n}={o}" for n, o in sorted(options.items()))]
    )


def _smaller(request: Request, table: Schedule) -> Schedule:
    """Return a table, or where it is large the same of fewer micro-batches, to compare cuts by."""
    fewer = 4 * table.num_ranks
    is_large = table.num_actions > _MOST_SIMULATED // 50 and table.num_microbatches > fewer
    if not is_large or request.schedule == "auto" or not isinstance(request.schedule, str):
        return table
    try:
        bare = table_of(replace(request, microbatches=fewer))
    except (ConfigError, ScheduleError):  # it goes with some numbers of micro-batches alone
        return table
    if bare.placement.num_stages != table.placement.num_stages:
        return table
    recompute = "except_last" if request.recompute == "budget" else request.recompute
    return dressed(bare, recompute, False)


def _on_this_cut(request: Request, partition: Partition, gauge: Gauge) -> Order:
    if request.schedule != "auto":
        table = table_of(request, **_copies(request, partition))
        return _with_budget(request, Order(partition, table), gauge)
    return _searched(request, partition, gauge)


def compares_placements(request: Request) -> bool:
    """Say whether the best of several placements is asked for."""
    return request.schedule == "auto" and request.options.get("placement") == "best"


def stages_of(request: Request) -> int:
    """Return into how many stages a model is cut at first; refuse what cannot be built."""
    if request.schedule != "auto":
        return table_of(request).num_stages  # refuses what cannot be built before layers are run
    if compares_placements(request):
        return ranks_of(request)
    size = {"ranks": ranks_of(request), "microbatches": request.microbatches}
    return num_stages("auto", **size, **request.options)


def paces_of(request: Request) -> Paces:
    """Return how slow ranks are, and their stages; ConfigError for what cannot be told so.

    Where placements are compared, for that with one stage a rank.
    """
    paces = given_paces(request)
    if paces is None:
        return ALIKE
    if compares_placements(request):
        return Paces(paces, paces)
    if shared_by(request) is not None:
        return ALIKE if len(set(paces)) == 1 else Paces((), paces)
    return _paces_on(_placement_of(request), paces)


def _paces_on(placement: Placement, paces: tuple[float, ...]) -> Paces:
    """Return how slow ranks and the stages on them are; a stage is as slow as its slowest rank."""
    stages = (placement.holders(stage) for stage in range(placement.num_stages))
    return Paces(tuple(max(paces[rank] for rank in held) for held in stages), paces)


def _placement_of(request: Request) -> Placement:
    if request.schedule != "auto":
        return table_of(request).placement
    known = {n: o for n, o in request.options.items() if n in ("placement", "stages_per_rank")}
    size = {"ranks": ranks_of(request), "microbatches": request.microbatches}
    return place(**{"kind": known.pop("placement", "one_each"), **size, **known})


def shared_by(request: Request) -> int | None:
    """Return how many ranks share the stages where these are in rows; None where they are not.

    The cut says how many hold each stage, unless the request does.
    """
    is_in_rows = request.schedule == "rerouted" or request.options.get("placement") == "rerouted"
    return ranks_of(request) if is_in_rows and "copies" not in request.options else None


def _copies(request: Request, partition: Partition) -> dict[str, Any]:
    """Return which ranks hold each stage of a cut, as options of schedules in rows."""
    if shared_by(request) is None:
        return {}
    copies = partition._replace(num_ranks=shared_by(request)).copies
    if request.schedule == "auto" or not partition.rank_paces:
        return {"copies": copies}  # the costs of a search say how slow ranks are
    return {"copies": copies, "paces": partition.rank_paces}


def table_of(request: Request, **more: Any) -> Schedule:
    """Return the bare table that is asked for; `more`: what `build` takes, options come first."""
    return table_asked_for(
        request.schedule,
        ranks=ranks_of(request),
        microbatches=request.microbatches,
        options={**more, **request.options},
    )


def ranks_of(request: Request) -> int:
    """Return the number of ranks of one pipeline."""
    assert isinstance(request.stages, int), "a layout is for a known number of ranks"
    return request.stages


def _searched(request: Request, partition: Partition, gauge: Gauge) -> Order:
    """Search an order for what layers take, or for equal stages where that is not known."""
    request = _with_costs(request, partition)
    costs = _copies(request, partition)
    if request.memory_bytes is None:
        return _with_budget(request, Order(partition, table_of(request, **costs)), gauge)
    if request.recompute != "budget":
        within = partial(_within, request, request.recompute, partition, gauge)
        return Order(partition, table_of(request, **costs, within=within))
    return _searched_with_budget(request, partition, gauge, costs)


def _with_costs(request: Request, partition: Partition) -> Request:
    """Return the request with costs for the search: what layers take, and how slow ranks are.

    Costs of the user's own stay; as long as all ranks are as fast and nobody has asked a gauge, the
    search counts stages as equal.
    """
    paces, own = dict(enumerate(partition.rank_paces)), request.options.get("costs")
    if own is None:
        if not (partition.times or paces):
            return request
        costs: object = partition.likely_costs()
    elif isinstance(own, Costs):
        costs = replace(own, paces=own.paces or paces)
    else:
        costs = {**({"paces": paces} if paces else {}), **own}
    return replace(request, schedule_options={**request.options, "costs": costs})


def _within(
    request: Request, recompute: str, partition: Partition, gauge: Gauge, placement: Placement
) -> Within:
    """Return what ranks may hold on a placement beside weights, gradients and optimizer."""
    model = gauge.count
    stages = count_stages(model, partition.counts)
    limits = memory_limits(request)
    assert limits is not None, "asked for within a limit alone"
    sharing = sharing_of(request, partition.counts, placement, gauge.layers)
    states = (
        rank_states(model, stages, placement, rank, request.kept_states, sharing)
        for rank in range(placement.num_ranks)
    )
    return Within(
        activation_memory(stages),
        [limit - each.total_bytes for limit, each in zip(limits, states, strict=True)],
        partial(dressed, recompute=recompute, offload=request.offload),
    )


def _searched_with_budget(
    request: Request, partition: Partition, gauge: Gauge, costs: dict[str, Any]
) -> Order:
    """Search orders that keep less and less, recompute what each must; return the fastest.

    Raises PartitionError, that of the order which keeps least, where none fits.
    """
    best: tuple[float, Order] | None = None
    refusal: PartitionError | None = None
    for table in _thriftier(request, partition, gauge, costs):
        try:
            found = _with_budget(request, Order(partition, table), gauge)
        except PartitionError as error:
            refusal = error
            continue
        took = _time_of(found, gauge)
        if best is None or took < best[0]:
            best = took, found
    if best is None:
        assert refusal is not None, "some order was tried"
        raise refusal
    return best[1]


def _thriftier(
    request: Request, partition: Partition, gauge: Gauge, costs: dict[str, Any]
) -> Iterator[Schedule]:
    """Yield bare tables: the fastest that fits if nothing is recomputed, or if everything is.

    Then those that keep no more than two pipelines full, and one; of equal ones the first.
    """
    seen: list[Schedule] = []
    each = len(partition.counts)
    for recompute, limit in (
        ("never", None),
        ("except_last", None),
        ("except_last", 2 * each),
        ("except_last", each),
    ):
        asked = request
        if limit is not None:
            if "limit" in request.options:
                return
            asked = replace(request, schedule_options={**request.options, "limit": limit})
        within = partial(_within, request, recompute, partition, gauge)
        table = table_of(asked, **costs, within=within)
        if table not in seen:
            seen.append(table)
            yield table


def _with_budget(request: Request, found: Order, gauge: Gauge) -> Order:
    """Choose what an order recomputes, if that is asked for."""
    if request.recompute != "budget":
        return found
    table = found.table
    if table.is_lowered or recomputes(table):
        raise ScheduleError(
            f"schedule {table.name!r}: recompute 'budget' places recomputation itself, expected a "
            f"bare table without R, got one with it or a lowered one; leave its R out"
        )
    limits = memory_limits(request)
    if limits is None:
        raise ConfigError(
            "recompute: 'budget' fits layers into memory, expected memory_bytes, got none; give "
            "the bytes that a rank may fill"
        )
    budget = choose_recompute(
        gauge.count,
        found.partition.counts,
        table,
        limits,
        request.kept_states,
        [each.forward for each in found.partition.times] if found.partition.is_measured else (),
        sharing_of(request, found.partition.counts, table.placement, gauge.layers),
        request.offload,
    )
    return found._replace(table=budget.schedule, budget=budget)


def _time_of(found: Order, gauge: Gauge) -> float:
    """Return how long an order takes, simulated, what it recomputes included.

    In seconds where layers were measured, else in FLOPs.
    """
    partition = found.partition
    recomputed = None if found.budget is None else found.budget.recomputed
    costs = partition.stage_costs(recomputed)
    if costs is None:
        counted = flop_costs(count_stages(gauge.count, partition.counts), recomputed)
        costs = replace(counted, paces=dict(enumerate(partition.rank_paces)))
    return simulate(found.table, costs).makespan


# What `placement=best` tries: a name of `auto`, and the stages of a rank.
_PLACEMENTS: Final = (("one_each", 1), ("wave", 2), ("looped", 2))
_WORTH_MORE_STAGES: Final = 0.99  # of the time with fewer


class _Tried(NamedTuple):
    """What an order on a placement takes, and what each rank holds; None: it cannot be counted."""

    order: Order
    time: float
    held: list[int] | None

    def beats(self, other: "_Tried", limits: Sequence[float] | None) -> bool:
        """Say whether it is worth more stages: it fits, or it is faster, or lacks less."""
        if limits is not None and self.held is not None and other.held is not None:
            lacks, other_lacks = (excess_bytes(each.held or (), limits) for each in (self, other))
            if lacks or other_lacks:
                return lacks < other_lacks
        return self.time < other.time * _WORTH_MORE_STAGES


def _best_placement(request: Request, given: Partition, gauge: Gauge) -> Order:
    """Search an order on several placements for what layers take; return the best, simulated.

    The best is the fastest of those that fit into the memory, or else the one that needs least.
    """
    ranks = ranks_of(request)
    if not given.times or "costs" in request.options:
        raise ConfigError(
            f"schedule 'auto': placement 'best' compares placements for measured layers, expected "
            f"partition 'time' and no costs, got {'costs' if given.times else 'another'}; correct "
            f"that, or choose a placement by name"
        )
    limits = memory_limits(request)
    best: _Tried | None = None
    lines: list[str] = []
    refusal: PartitionError | None = None
    for placement, each in _PLACEMENTS:
        if each > 1 and ranks * each > len(given.costs):
            continue
        head = f"auto: {placement} with {each} stage{'s' * (each > 1)} a rank"
        try:
            Ends.where(given.pins, len(given.costs), ranks * each)
        except PartitionError as error:
            refusal = refusal or error
            lines.append(f"{head}: its stages cannot hold pipeline.pins")
            continue
        try:
            tried = _placed(request, given, gauge, placement, each)
        except PartitionError as error:
            refusal = refusal or error
            lines.append(f"{head}: nothing fits")
            continue
        # Counted, the time of a step is that of so many FLOPs: fewer than all ranks have together.
        amount = f"{tried.time:.3f} s"
        if not given.is_measured:
            amount = f"as long as {flops_text(tried.time)} of one rank"
        held = "" if tried.held is None else f", {bytes_text(max(tried.held))} on the fullest rank"
        lines.append(f"{head}: a step takes {amount}{held}")
        if best is None or tried.beats(best, limits):
            best = tried
    if best is None:
        assert refusal is not None, "one stage a rank is among them"
        raise refusal
    return best.order._replace(searched="\n".join(lines))


def _placed(request: Request, given: Partition, gauge: Gauge, placement: str, each: int) -> _Tried:
    """Return the order that `auto` finds on a placement, how long it takes, and what it holds.

    The cut is made anew, for ranks as slow as they are.
    """
    ranks, paces = ranks_of(request), given_paces(request)
    where = place(placement, ranks, request.microbatches, each)
    stages, of_ranks = ALIKE if paces is None else _paces_on(where, paces)
    partition = given._replace(paces=stages, rank_paces=of_ranks).cut_anew(ranks * each)
    options = {**request.options, "placement": placement, "stages_per_rank": each}
    limit = options.get("limit")
    if limit is not None:  # in micro-batches of a rank's whole share, whatever its stages
        options["limit"] = [x * each for x in limit] if isinstance(limit, list) else limit * each
    asked = replace(request, schedule_options=options)
    found = _searched(asked, partition, gauge)
    found = _settled(asked, found, gauge, partial(_searched, asked, gauge=gauge))
    partition = found.partition
    dress: Callable[[Schedule], Schedule] = partial(
        dressed,
        recompute="never" if found.budget else request.recompute,
        offload=request.offload,
    )
    whole = found._replace(table=dress(found.table))
    recomputed = None if found.budget is None else found.budget.recomputed
    try:
        held = held_bytes(
            gauge.count,
            partition.counts,
            whole.table,
            request.kept_states,
            recomputed,
            sharing_of(request, partition.counts, whole.table.placement, gauge.layers),
        )
    except GpipeError:
        return _Tried(found, _time_of(whole, gauge), None)
    return _Tried(found, _time_of(whole, gauge), held)
