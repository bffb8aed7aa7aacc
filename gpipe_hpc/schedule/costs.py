"""Costs of actions, the input of the simulator: durations, links and bytes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.table.actions import Op
from gpipe_hpc.schedule.table.schedule import Skip

Cost = float | Sequence[float]


@dataclass(frozen=True)
class Link:
    """A link between two ranks: latency, and bandwidth in bytes per unit of time."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        """Check that the latency is finite and not negative, and the bandwidth positive."""
        if not (0 <= self.latency < math.inf and self.bandwidth > 0):
            raise ScheduleError(
                "costs: a link needs a latency of 0 or more and a bandwidth above 0, got "
                f"{self.latency} and {self.bandwidth}"
            )


@dataclass(frozen=True)
class Costs:
    """Duration of each op, one number for all stages or one per stage, in any unit of time.

    Args:
        forward: cost of ``F``.
        backward: cost of ``B``; None means `input_gradient` plus `weight_gradient`.
        input_gradient: cost of ``I``.
        weight_gradient: cost of ``W``.
        recompute: cost of ``R``.
        bare_forward: cost of an ``F`` whose micro-batch is recomputed later; None means `forward`.
        send: fixed time of a transfer over the boundary after each stage, in either direction.
        boundary_bytes: bytes of this transfer. Its time is `send`, plus the bytes divided by the
            bandwidth of the link, plus the latency of the link.
        link: the default link between two ranks.
        links: links that differ, by (source rank, destination rank).
        skip_bytes: bytes of skips, by (source stage, destination stage); other skips take no time.
        reduction: time to reduce the gradients of a stage.
        reduction_latency: additional time per bucket.
        bucket_shares: share of each bucket in the reduction of a stage; default: equal shares.
        reduces_within: whether a bucket's reduction starts during the last backward of its stage.
        gather: time to gather the parameters of a stage (``UNSHARD``), divided like reductions.
        offload: time to copy activations to the host, in parallel with compute.
        fetch: time to copy them back.
        paces: relative compute time of slow ranks, by rank; 1 if absent.
        shares: size of each micro-batch relative to a full one, 0 if empty. Scales times and bytes
            but not latencies. Empty: all are full.
    """

    forward: Cost | None = None
    backward: Cost | None = None
    input_gradient: Cost | None = None
    weight_gradient: Cost | None = None
    recompute: Cost | None = None
    send: Cost = 0.0
    boundary_bytes: Cost = 0.0
    skip_bytes: Mapping[Skip, float] = field(default_factory=dict)
    link: Link = Link()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    reduction: Cost = 0.0
    reduction_latency: Cost = 0.0
    bucket_shares: Mapping[int, Sequence[float]] = field(default_factory=dict)
    reduces_within: bool = False
    gather: Cost = 0.0
    offload: Cost = 0.0
    fetch: Cost = 0.0
    bare_forward: Cost | None = None
    shares: Sequence[float] = ()
    paces: Mapping[int, float] = field(default_factory=dict)

    def of_compute(self, op: Op, num_stages: int) -> list[float]:
        """Return the cost of a compute op or copy on each stage.

        Raises ScheduleError if no cost is given for the op.
        """
        if op is Op.B and self.backward is None:
            inputs, weights = (self.of_compute(part, num_stages) for part in (Op.I, Op.W))
            return [first + second for first, second in zip(inputs, weights, strict=True)]
        field = _FIELD_OF[op]
        cost: Cost | None = getattr(self, field)
        if cost is None:
            raise ScheduleError(f"costs: no cost for {op}; set {field}")
        return per_stage(field, cost, num_stages)

    def of_bare_forward(self, num_stages: int) -> list[float]:
        """Return the cost on each stage of a forward whose micro-batch is recomputed later."""
        if self.bare_forward is None:
            return self.of_compute(Op.F, num_stages)
        return per_stage("bare_forward", self.bare_forward, num_stages)

    def of_reduction(self, num_stages: int) -> list[float]:
        """Return the time to reduce the gradients of each stage."""
        return per_stage("reduction", self.reduction, num_stages)

    def of_reduction_latency(self, num_stages: int) -> list[float]:
        """Return the additional reduction time per bucket for each stage."""
        return per_stage("reduction_latency", self.reduction_latency, num_stages)

    def of_paces(self, num_ranks: int) -> list[float]:
        """Return the relative compute time of each rank.

        Raises ScheduleError for an unknown rank or a factor that is not positive and finite.
        """
        each = [1.0] * num_ranks
        for rank, pace in self.paces.items():
            if not (0 <= rank < num_ranks and 0 < pace < math.inf):
                raise ScheduleError(
                    f"costs: paces must be factors above 0 for ranks of 0 to {num_ranks - 1}, "
                    f"got {pace} for rank {rank}"
                )
            each[rank] = float(pace)
        return each

    def of_gather(self, num_stages: int) -> list[float]:
        """Return the time to gather the parameters of each stage."""
        return per_stage("gather", self.gather, num_stages)

    def of_shares(self, num_microbatches: int) -> list[float]:
        """Return the size of each micro-batch relative to a full one."""
        return shares_of_each(self.shares, num_microbatches)

    def of_buckets(self, stage: int, num_buckets: int) -> list[float]:
        """Return the share of each bucket in the reduction of a stage; the shares sum to 1."""
        given = list(self.bucket_shares.get(stage, [1.0] * num_buckets))
        if len(given) != num_buckets or not sum(given) > 0 or min(given) < 0:
            raise ScheduleError(
                f"costs: bucket_shares of stage {stage} need one amount of 0 or more for each of "
                f"its {num_buckets} buckets, got {given}"
            )
        return [each / sum(given) for each in given]

    def transfer_times(self, num_stages: int) -> "TransferTime":
        """Return a function that computes the time of a transfer; see `TransferTime`."""
        fixed = per_stage("send", self.send, num_stages)
        sizes = per_stage("boundary_bytes", self.boundary_bytes, num_stages)
        skips = list(self.skip_bytes)
        amounts = per_stage("skip_bytes", list(self.skip_bytes.values()), len(skips))
        skip_sizes = dict(zip(skips, amounts, strict=True))

        def time(way: int | Skip, ranks: tuple[int, int], share: float = 1.0) -> float:
            link = self.links.get(ranks, self.link)
            if isinstance(way, tuple):
                return link.latency + share * skip_sizes.get(way, 0.0) / link.bandwidth
            return share * fixed[way] + link.latency + share * sizes[way] / link.bandwidth

        return time

    def recut(
        self, num_ranks: int, num_stages: int, copies: Sequence[int] | None = None
    ) -> "Costs":
        """Return the costs of the same model on the same ranks with a different number of stages.

        A single number is the cost of a rank's share of the model: with v stages per rank, each
        stage costs 1/v of that number. A list has one entry per equal part of the model, in order
        of layers; a stage costs the sum over the parts that it covers. Transfers cost the same at
        any boundary. `copies` is the number of ranks that share each stage.
        """

        def of_stages(field: str, cost: Cost) -> Cost:
            if copies is not None and not isinstance(cost, Iterable):
                return [cost * number for number in copies]
            return _recut(field, cost, num_ranks, num_stages)

        def if_given(field: str, cost: Cost | None) -> Cost | None:
            return None if cost is None else of_stages(field, cost)

        return replace(
            self,
            forward=if_given("forward", self.forward),
            bare_forward=if_given("bare_forward", self.bare_forward),
            backward=if_given("backward", self.backward),
            input_gradient=if_given("input_gradient", self.input_gradient),
            weight_gradient=if_given("weight_gradient", self.weight_gradient),
            recompute=if_given("recompute", self.recompute),
            reduction=of_stages("reduction", self.reduction),
            reduction_latency=_last_of("reduction_latency", self.reduction_latency, num_stages),
            gather=of_stages("gather", self.gather),
            offload=of_stages("offload", self.offload),
            fetch=of_stages("fetch", self.fetch),
            send=_last_of("send", self.send, num_stages),
            boundary_bytes=_last_of("boundary_bytes", self.boundary_bytes, num_stages),
        )

    def without_transfers(self) -> "Costs":
        """Return the same costs with free transfers, copies and all-gathers."""
        free = replace(self, send=0.0, boundary_bytes=0.0, skip_bytes={}, link=Link(), links={})
        return replace(free, offload=0.0, fetch=0.0, gather=0.0)


class TransferTime(Protocol):
    """Interface of a function that returns the time of a transfer."""

    def __call__(self, way: int | Skip, ranks: tuple[int, int], share: float = 1.0) -> float:
        """Return the time of a transfer between two ranks.

        Args:
            way: the boundary, as the number of the stage before it, or the skip.
            ranks: source and destination rank.
            share: size of the micro-batch relative to a full one.
        """
        ...


def shares_of_each(shares: Sequence[float], num_microbatches: int) -> list[float]:
    """Return the relative size of each micro-batch, 1 if `shares` is empty.

    Raises ScheduleError for a wrong number of shares or a value outside 0 to 1.
    """
    if not shares:
        return [1.0] * num_microbatches
    if len(shares) != num_microbatches or not all(0 <= share <= 1 for share in shares):
        raise ScheduleError(
            f"costs: shares needs a number from 0 to 1 for each of {num_microbatches} "
            f"micro-batches, got {list(shares)}"
        )
    return list(shares)


_FIELD_OF: Final = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input_gradient",
    Op.W: "weight_gradient",
    Op.R: "recompute",
    Op.OFFLOAD: "offload",
    Op.FETCH: "fetch",
}


def _recut(field: str, cost: Cost, num_ranks: int, num_stages: int) -> Cost:
    """Convert a cost per stage to another number of stages."""
    if not isinstance(cost, Iterable):
        return cost * num_ranks / num_stages
    parts = list(cost)
    stages, each = _stages_and_parts(field, len(parts), num_stages)
    return [
        sum(parts[first : first + each]) / stages
        for first in range(0, len(parts), each)
        for _ in range(stages)
    ]


def _last_of(field: str, cost: Cost, num_stages: int) -> Cost:
    """Convert a cost per boundary to another number of stages.

    A boundary at the end of model parts costs what is given for the last of these parts; a boundary
    inside a part costs what is given for that part.
    """
    if not isinstance(cost, Iterable):
        return cost
    parts = list(cost)
    stages, each = _stages_and_parts(field, len(parts), num_stages)
    return [part for part in parts[each - 1 :: each] for _ in range(stages)]


def _stages_and_parts(field: str, num_parts: int, num_stages: int) -> tuple[int, int]:
    """Return stages per model part and model parts per stage; one of the two is 1."""
    if num_parts and num_stages % num_parts == 0:
        return num_stages // num_parts, 1
    if num_parts and num_parts % num_stages == 0:
        return 1, num_parts // num_stages
    raise ScheduleError(
        f"costs: {field} has {num_parts} values, expected one value, or a number of values that "
        f"divides or is a multiple of the {num_stages} stages"
    )


def per_stage(field: str, cost: Cost, num_stages: int) -> list[float]:
    """Return a cost as one number for each stage; `field` names it in errors.

    Raises ScheduleError for a wrong number of values or one that is not finite and at least 0.
    """
    each = list(cost) if isinstance(cost, Iterable) else [cost] * num_stages
    if len(each) != num_stages:
        raise ScheduleError(
            f"costs: {field} has {len(each)} values, expected one value or one for each of "
            f"{num_stages} stages"
        )
    try:
        costs = [float(one) for one in each]
    except (TypeError, ValueError):
        raise ScheduleError(
            f"costs: {field} must be a number or a list with a number for each stage, got {cost!r}"
        ) from None
    for one in costs:
        if not (math.isfinite(one) and one >= 0):
            raise ScheduleError(f"costs: {field} must be finite and 0 or more, got {one}")
    return costs
