"""Choose the order of actions for a partitioned model: a named schedule, or one found by search."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from gpipe_hpc.errors import ConfigError, GpipeError, PartitionError, ScheduleError
from gpipe_hpc.planner.buckets import sharing_of
from gpipe_hpc.planner.budget.fitting import Budget, choose_recompute
from gpipe_hpc.planner.costs.cost_models import CostModel
from gpipe_hpc.planner.cutting.memory_aware import fitting_cut, lacks_memory
from gpipe_hpc.planner.cutting.partition import ALIKE, SIMULATED, Partition, Slowdowns
from gpipe_hpc.planner.cutting.pins import EndRanges
from gpipe_hpc.planner.cutting.simulated import faster_cut, has_shared_ranks
from gpipe_hpc.planner.forecast import (
    activation_memory,
    flop_costs,
    peak_bytes_of_ranks,
    rank_states,
)
from gpipe_hpc.planner.memory.by_rank import excess_bytes, given_paces, memory_limits
from gpipe_hpc.planner.request import Request
from gpipe_hpc.planner.stages import count_stages
from gpipe_hpc.planner.tables import recomputes, requested_table, with_recompute_and_offload
from gpipe_hpc.schedule import (
    Costs,
    MemoryAllowance,
    Placement,
    Schedule,
    build,
    num_stages,
    place,
    simulate,
)
from gpipe_hpc.units import bytes_text, flops_text


class OrderedCut(NamedTuple):
    """A partition, and a schedule table for it without communication.

    Attributes:
      budget: the recomputation chosen by memory, if requested; the table then has its R actions.
      searched: description of the search, for messages.
    """

    partition: Partition
    table: Schedule
    budget: Budget | None = None
    searched: str = ""


def order(request: Request, partition: Partition, cost_model: CostModel) -> OrderedCut:
    """Return the requested schedule for a partition; ``auto`` searches one within memory limits.

    If some rank exceeds its memory limit with this partition, but fits with another one, the other
    one is used. Raises ConfigError, ModelError, PartitionError or ScheduleError for impossible
    requests.
    """
    if compares_placements(request):
        return _best_placement(request, partition, cost_model)
    if memory_limits(request) is None:
        return _on_cut(request, partition, cost_model)
    try:
        found = _on_cut(request, partition, cost_model)
    except PartitionError:  # no recomputation fits
        roomier = fitting_cut(request, partition, _thrifty(request), cost_model)
        if roomier is None:
            raise
        return _on_cut(request, roomier, cost_model)
    if request.recompute == "budget" or not lacks_memory(
        request, partition, found.table, cost_model
    ):
        return found
    roomier = fitting_cut(request, partition, found.table, cost_model)
    return found if roomier is None else _on_cut(request, roomier, cost_model)


def _thrifty(request: Request) -> Schedule:
    """Return the requested table; for a search 1F1B, which keeps the fewest micro-batches alive."""
    if request.schedule != "auto":
        return table_of(request)
    return build("one_f_one_b", ranks=ranks_of(request), microbatches=request.microbatches)


def _on_cut(request: Request, partition: Partition, cost_model: CostModel) -> OrderedCut:
    """Return the schedule for a partition; if it is open, for the fastest partition found."""
    found = _on_this_cut(request, partition, cost_model)
    return _settled(
        request, found, cost_model, partial(_on_this_cut, request, cost_model=cost_model)
    )


_MOST_SIMULATED: Final = 100_000  # simulated actions in the search for a cut: half a second


def _settled(
    request: Request,
    found: OrderedCut,
    cost_model: CostModel,
    order_of: Callable[[Partition], OrderedCut],
) -> OrderedCut:
    """Replace a partition that is open by the fastest one found by simulation with its table.

    Applies if ranks hold several stages; partitions are simulated with free transfers. `order_of`
    returns the schedule for a partition. A partition that fits in memory is not replaced by a
    faster one that does not.
    """
    before = found.partition
    table = found.table
    settled = found._replace(partition=before._replace(is_open=False))
    is_open = before.is_open and before.num_ranks is None
    if not is_open or not has_shared_ranks(table.placement):
        return settled
    judge = _smaller(
        request,
        table if found.budget else with_recompute_and_offload(table, request.recompute, False),
    )

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
    except PartitionError:  # no recomputation fits
        return settled
    if memory_limits(request) is not None and request.recompute != "budget":
        lacks = lacks_memory(request, faster, other.table, cost_model)
        if lacks and not lacks_memory(request, before, table, cost_model):
            return settled
    return other if _time_of(other, cost_model) < _time_of(settled, cost_model) else settled


def is_simulated(request: Request, kept: Partition) -> bool:
    """Return whether a partition was, or may be, chosen by simulation."""
    return request.partition == SIMULATED or bool(kept.made_on)


def place_name(request: Request) -> str:
    """Return a string that identifies the placement: schedule, its options, number of ranks."""
    name = request.schedule if isinstance(request.schedule, str) else request.schedule.name
    options = {n: o for n, o in request.options.items() if isinstance(o, str | int | float)}
    return " ".join(
        [name, f"{request.stages} ranks", *(f"{n}={o}" for n, o in sorted(options.items()))]
    )


def _smaller(request: Request, table: Schedule) -> Schedule:
    """Return a table for comparing partitions: fewer micro-batches if the given one is large."""
    fewer = 4 * table.num_ranks
    is_large = table.num_actions > _MOST_SIMULATED // 50 and table.num_microbatches > fewer
    if not is_large or request.schedule == "auto" or not isinstance(request.schedule, str):
        return table
    try:
        bare = table_of(replace(request, microbatches=fewer))
    except (ConfigError, ScheduleError):  # works only with some numbers of micro-batches
        return table
    if bare.placement.num_stages != table.placement.num_stages:
        return table
    recompute = "except_last" if request.recompute == "budget" else request.recompute
    return with_recompute_and_offload(bare, recompute, False)


def _on_this_cut(request: Request, partition: Partition, cost_model: CostModel) -> OrderedCut:
    if request.schedule != "auto":
        table = table_of(request, **_copies(request, partition))
        return _with_budget(request, OrderedCut(partition, table), cost_model)
    return _searched(request, partition, cost_model)


def compares_placements(request: Request) -> bool:
    """Return whether the request asks for the best of several placements."""
    return request.schedule == "auto" and request.options.get("placement") == "best"


def stages_of(request: Request) -> int:
    """Return the number of stages of the initial partition.

    Raises ConfigError or ScheduleError for impossible requests.
    """
    if request.schedule != "auto":
        return table_of(request).num_stages  # raises for impossible tables before running layers
    if compares_placements(request):
        return ranks_of(request)
    size = {"ranks": ranks_of(request), "microbatches": request.microbatches}
    return num_stages("auto", **size, **request.options)


def paces_of(request: Request) -> Slowdowns:
    """Return the slowdowns of ranks and stages; raise ConfigError for invalid values.

    If placements are compared, the placement has one stage per rank.
    """
    paces = given_paces(request)
    if paces is None:
        return ALIKE
    if compares_placements(request):
        return Slowdowns(paces, paces)
    if shared_by(request) is not None:
        return ALIKE if len(set(paces)) == 1 else Slowdowns((), paces)
    return _paces_on(_placement_of(request), paces)


def _paces_on(placement: Placement, paces: tuple[float, ...]) -> Slowdowns:
    """Return the slowdowns of ranks and stages; a stage is as slow as its slowest rank."""
    stages = (placement.holders(stage) for stage in range(placement.num_stages))
    return Slowdowns(tuple(max(paces[rank] for rank in held) for held in stages), paces)


def _placement_of(request: Request) -> Placement:
    if request.schedule != "auto":
        return table_of(request).placement
    known = {n: o for n, o in request.options.items() if n in ("placement", "stages_per_rank")}
    size = {"ranks": ranks_of(request), "microbatches": request.microbatches}
    return place(**{"kind": known.pop("placement", "one_each"), **size, **known})


def shared_by(request: Request) -> int | None:
    """Return the number of ranks that share the stages of partial replicas, or None without these.

    None also if the request sets the ranks of each stage; otherwise they follow from the partition.
    """
    is_in_rows = request.schedule == "rerouted" or request.options.get("placement") == "rerouted"
    return ranks_of(request) if is_in_rows and "copies" not in request.options else None


def _copies(request: Request, partition: Partition) -> dict[str, Any]:
    """Return the schedule options of partial replicas: number of ranks of each stage, slowdowns."""
    if shared_by(request) is None:
        return {}
    copies = partition._replace(num_ranks=shared_by(request)).copies
    if request.schedule == "auto" or not partition.rank_paces:
        return {"copies": copies}  # the costs of a search contain the slowdowns
    return {"copies": copies, "paces": partition.rank_paces}


def table_of(request: Request, **more: Any) -> Schedule:
    """Build the requested table; `more` are further options, overridden by those of the request."""
    return requested_table(
        request.schedule,
        ranks=ranks_of(request),
        microbatches=request.microbatches,
        options={**more, **request.options},
    )


def ranks_of(request: Request) -> int:
    """Return the number of ranks of one pipeline."""
    assert isinstance(request.stages, int), "the number of stages is resolved before"
    return request.stages


def _searched(request: Request, partition: Partition, cost_model: CostModel) -> OrderedCut:
    """Search a schedule for the layer times, or for stages of equal time if those are unknown."""
    request = _with_costs(request, partition)
    costs = _copies(request, partition)
    if request.memory_bytes is None:
        return _with_budget(request, OrderedCut(partition, table_of(request, **costs)), cost_model)
    if request.recompute != "budget":
        within = partial(_within, request, request.recompute, partition, cost_model)
        return OrderedCut(partition, table_of(request, **costs, within=within))
    return _searched_with_budget(request, partition, cost_model, costs)


def _with_costs(request: Request, partition: Partition) -> Request:
    """Return the request with costs for the search: layer times and slowdowns.

    Costs set by the user are kept. Without layer times and with equal ranks, the search assumes
    stages of equal time.
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
    request: Request,
    recompute: str,
    partition: Partition,
    cost_model: CostModel,
    placement: Placement,
) -> MemoryAllowance:
    """Return the memory that each rank may use for activations with a placement."""
    model = cost_model.count
    stages = count_stages(model, partition.counts)
    limits = memory_limits(request)
    assert limits is not None, "called only with a memory limit"
    sharing = sharing_of(request, partition.counts, placement, cost_model.layers)
    states = (
        rank_states(model, stages, placement, rank, request.kept_states, sharing)
        for rank in range(placement.num_ranks)
    )
    return MemoryAllowance(
        activation_memory(stages),
        [limit - each.total_bytes for limit, each in zip(limits, states, strict=True)],
        partial(with_recompute_and_offload, recompute=recompute, offload=request.offload),
    )


def _searched_with_budget(
    request: Request, partition: Partition, cost_model: CostModel, costs: dict[str, Any]
) -> OrderedCut:
    """Search schedules that keep fewer and fewer micro-batches alive, each with recomputation.

    Returns the fastest one that fits. If none does, raises the PartitionError of the last one.
    """
    best: tuple[float, OrderedCut] | None = None
    refusal: PartitionError | None = None
    for table in _thriftier(request, partition, cost_model, costs):
        try:
            found = _with_budget(request, OrderedCut(partition, table), cost_model)
        except PartitionError as error:
            refusal = error
            continue
        took = _time_of(found, cost_model)
        if best is None or took < best[0]:
            best = took, found
    if best is None:
        assert refusal is not None, "some order was tried"
        raise refusal
    return best[1]


def _thriftier(
    request: Request, partition: Partition, cost_model: CostModel, costs: dict[str, Any]
) -> Iterator[Schedule]:
    """Yield tables that keep fewer and fewer micro-batches alive, without duplicates.

    First the fastest that fit without recomputation, and with recomputation of all layers. Then
    those that keep at most two micro-batches per stage alive, and at most one.
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
        within = partial(_within, request, recompute, partition, cost_model)
        table = table_of(asked, **costs, within=within)
        if table not in seen:
            seen.append(table)
            yield table


def _with_budget(request: Request, found: OrderedCut, cost_model: CostModel) -> OrderedCut:
    """Choose the layers to recompute if the request has recompute=budget; else change nothing."""
    if request.recompute != "budget":
        return found
    table = found.table
    if table.is_lowered or recomputes(table):
        raise ScheduleError(
            f"schedule {table.name!r}: recompute 'budget' adds recomputation itself, but the table "
            f"already has R actions or is lowered; pass a table without R and communication"
        )
    limits = memory_limits(request)
    if limits is None:
        raise ConfigError(
            "recompute: 'budget' needs pipeline.memory_bytes, which is not set; set it to the "
            "bytes that each rank may use"
        )
    budget = choose_recompute(
        cost_model.count,
        found.partition.counts,
        table,
        limits,
        request.kept_states,
        [each.forward for each in found.partition.times] if found.partition.is_measured else (),
        sharing_of(request, found.partition.counts, table.placement, cost_model.layers),
        request.offload,
    )
    return found._replace(table=budget.schedule, budget=budget)


def _time_of(found: OrderedCut, cost_model: CostModel) -> float:
    """Return the simulated step time including recomputation.

    The unit is seconds if layers were measured, else FLOPs.
    """
    partition = found.partition
    recomputed = None if found.budget is None else found.budget.recomputed
    costs = partition.stage_costs(recomputed)
    if costs is None:
        counted = flop_costs(count_stages(cost_model.count, partition.counts), recomputed)
        costs = replace(counted, paces=dict(enumerate(partition.rank_paces)))
    return simulate(found.table, costs).makespan


# Placements compared by `placement=best`: a placement name of `auto`, and stages per rank.
_PLACEMENTS: Final = (("one_each", 1), ("wave", 2), ("looped", 2))
_WORTH_MORE_STAGES: Final = 0.99  # more stages must save at least 1 % of the time


class _OrderTrial(NamedTuple):
    """A schedule on one placement: simulated time, and memory of each rank (None if unknown)."""

    order: OrderedCut
    time: float
    held: list[int] | None

    def beats(self, other: "_OrderTrial", limits: Sequence[float] | None) -> bool:
        """Return whether this placement is better than another one with fewer stages.

        If both fit in memory, the faster one is better; else the one with the smaller excess.
        """
        if limits is not None and self.held is not None and other.held is not None:
            lacks, other_lacks = (excess_bytes(each.held or (), limits) for each in (self, other))
            if lacks or other_lacks:
                return lacks < other_lacks
        return self.time < other.time * _WORTH_MORE_STAGES


def _best_placement(request: Request, given: Partition, cost_model: CostModel) -> OrderedCut:
    """Search a schedule on each of several placements and return the best one by simulation.

    The best is the fastest of those that fit in memory, or else the one that exceeds it least.
    """
    ranks = ranks_of(request)
    if not given.times or "costs" in request.options:
        raise ConfigError(
            f"schedule 'auto': placement 'best' compares placements by measured layer times, but "
            f"{'costs are set' if given.times else 'the partition has none'}; use partition 'time' "
            f"without costs, or set a placement by name"
        )
    limits = memory_limits(request)
    best: _OrderTrial | None = None
    lines: list[str] = []
    refusal: PartitionError | None = None
    for placement, each in _PLACEMENTS:
        if each > 1 and ranks * each > len(given.costs):
            continue
        head = f"auto: {placement} with {each} stage{'s' * (each > 1)} a rank"
        try:
            EndRanges.where(given.pins, len(given.costs), ranks * each)
        except PartitionError as error:
            refusal = refusal or error
            lines.append(f"{head}: its stages cannot satisfy pipeline.pins")
            continue
        try:
            tried = _placed(request, given, cost_model, placement, each)
        except PartitionError as error:
            refusal = refusal or error
            lines.append(f"{head}: nothing fits")
            continue
        # With counted layers the step time is in FLOPs of one rank.
        amount = f"{tried.time:.3f} s"
        if not given.is_measured:
            amount = f"as long as {flops_text(tried.time)} on one rank"
        held = "" if tried.held is None else f", {bytes_text(max(tried.held))} on the fullest rank"
        lines.append(f"{head}: a step takes {amount}{held}")
        if best is None or tried.beats(best, limits):
            best = tried
    if best is None:
        assert refusal is not None, "one stage per rank is always tried"
        raise refusal
    return best.order._replace(searched="\n".join(lines))


def _placed(
    request: Request, given: Partition, cost_model: CostModel, placement: str, each: int
) -> _OrderTrial:
    """Search a schedule on one placement; return the schedule, its time and its memory.

    The model is partitioned again for this placement and the slowdowns of ranks.
    """
    ranks, paces = ranks_of(request), given_paces(request)
    where = place(placement, ranks, request.microbatches, each)
    stages, of_ranks = ALIKE if paces is None else _paces_on(where, paces)
    partition = given._replace(paces=stages, rank_paces=of_ranks).cut_anew(ranks * each)
    options = {**request.options, "placement": placement, "stages_per_rank": each}
    limit = options.get("limit")
    if limit is not None:  # counted per rank, so scaled by its number of stages
        options["limit"] = [x * each for x in limit] if isinstance(limit, list) else limit * each
    asked = replace(request, schedule_options=options)
    found = _searched(asked, partition, cost_model)
    found = _settled(asked, found, cost_model, partial(_searched, asked, cost_model=cost_model))
    partition = found.partition
    dress: Callable[[Schedule], Schedule] = partial(
        with_recompute_and_offload,
        recompute="never" if found.budget else request.recompute,
        offload=request.offload,
    )
    whole = found._replace(table=dress(found.table))
    recomputed = None if found.budget is None else found.budget.recomputed
    try:
        held = peak_bytes_of_ranks(
            cost_model.count,
            partition.counts,
            whole.table,
            request.kept_states,
            recomputed,
            sharing_of(request, partition.counts, whole.table.placement, cost_model.layers),
        )
    except GpipeError:
        return _OrderTrial(found, _time_of(whole, cost_model), None)
    return _OrderTrial(found, _time_of(whole, cost_model), held)
