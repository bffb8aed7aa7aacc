"""Forecast each rank's memory, sent bytes and simulated time from layer costs and a schedule."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Final, NamedTuple

from gpipe_hpc.planner.costs.counted import ModelCount
from gpipe_hpc.planner.memory.optimizer import OptimizerMemory
from gpipe_hpc.planner.memory.sharing import OptimizerSharing, ShardBytes
from gpipe_hpc.planner.stages import StageCount, count_stages
from gpipe_hpc.schedule import (
    Action,
    Costs,
    Memory,
    Op,
    Parallelism,
    Placement,
    Schedule,
    Timeline,
    parallelism_of,
    peak_copies,
    peak_memory,
    simulate,
)
from gpipe_hpc.schedule.costs import shares_of_each
from gpipe_hpc.schedule.table.actions import SENDS

NEIGHBOUR_STATES: Final = 4
"""In-memory checkpoints per rank: two of its own state and two of its neighbour's."""

Recomputed = Sequence[Collection[int]]
"""For each stage, the indices of the layers that its R actions recompute."""


@dataclass(frozen=True)
class RankStates:
    """Memory that a rank needs apart from activations, in bytes, and the stages it holds.

    Attributes:
      cast_bytes: low-precision copies of weights, made once per step for all micro-batches.
      workspace_bytes: temporary memory of the stage that needs most while it runs.
      process_bytes: memory of the process besides tensors, on the device or host that stores the
        tensors; 0 if not measured.
      update_bytes: temporary memory of the optimizer step, when no activations are alive.
      saving_bytes: host buffers for checkpoints; on a CPU rank they share memory with the tensors.
      neighbour_bytes: in-memory checkpoints, in memory-backed files of the host.
      is_on_device: whether tensors are in device memory, so that saving_bytes do not count there.
    """

    stages: tuple[int, ...]
    parameters: int
    weight_bytes: int
    cast_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    workspace_bytes: int
    process_bytes: int
    update_bytes: int = field(default=0, kw_only=True)
    saving_bytes: int = field(default=0, kw_only=True)
    neighbour_bytes: int = field(default=0, kw_only=True)
    is_on_device: bool = field(default=False, kw_only=True)

    @property
    def lasting_bytes(self) -> int:
        """Return the permanently used bytes: weights, gradients, optimizer, process, buffers."""
        weights = self.weight_bytes + self.cast_bytes
        saving = 0 if self.is_on_device else self.saving_bytes
        return weights + self.gradient_bytes + self.optimizer_bytes + self.process_bytes + saving

    @property
    def total_bytes(self) -> int:
        """Return the bytes needed without activations: permanent memory and workspace."""
        return self.lasting_bytes + self.workspace_bytes

    def with_activations(self, activation_bytes: int) -> int:
        """Return the peak bytes: the larger of forward and backward, and optimizer step."""
        return self.lasting_bytes + max(self.workspace_bytes + activation_bytes, self.update_bytes)


@dataclass(frozen=True)
class RankForecast(RankStates):
    """Peak memory of one rank, and the bytes it sends in a step.

    `offloaded_bytes`: peak host memory for activations offloaded from an accelerator; not part of
    the total.
    """

    activation_bytes: int
    sent_bytes: int
    offloaded_bytes: int = field(default=0, kw_only=True)

    @property
    def total_bytes(self) -> int:
        """Return the peak bytes: the larger of forward and backward, and optimizer step."""
        return self.with_activations(self.activation_bytes)


@dataclass(frozen=True)
class Forecast:
    """Forecast of one step of one replica; times are in FLOPs.

    `paces`: slowdown of each rank.
    """

    stages: tuple[StageCount, ...]
    ranks: tuple[RankForecast, ...]
    timeline: Timeline
    step_flops: int  # of all ranks, including recomputation
    num_empty: int = 0  # micro-batches without a sample
    paces: tuple[float, ...] = ()

    @cached_property
    def parallelism(self) -> Parallelism:
        """Return work and depth of the step, in FLOPs."""
        return parallelism_of(self.timeline, self.paces)


def forecast(
    model: ModelCount,
    counts: Sequence[int],
    schedule: Schedule,
    optimizer_states: int | OptimizerMemory,
    recomputed: Recomputed | None = None,
    shares: Sequence[float] = (),
    sharing: OptimizerSharing | None = None,
    paces: Sequence[float] = (),
) -> Forecast:
    """Forecast one step of a model under a lowered schedule; communication takes no time.

    Args:
      counts: number of layers of each stage.
      optimizer_states: number of values the optimizer keeps per parameter, or its memory model.
      recomputed: for each stage, the layers that its R actions recompute; None: all layers.
      shares: sizes of the micro-batches relative to the counted one, if not all are equal (see
        `microbatch_shares`). Work and activations are proportional to samples.
      sharing: how replicas shard the optimizer state; None if each keeps all of it.
      paces: slowdown of each rank.
    """
    stages = count_stages(model, counts)
    costs = replace(flop_costs(stages, recomputed), shares=shares, paces=dict(enumerate(paces)))
    timeline = simulate(schedule, costs)
    return Forecast(
        stages=stages,
        ranks=rank_forecasts(
            model, stages, schedule, optimizer_states, recomputed, shares, sharing
        ),
        timeline=timeline,
        step_flops=round(_sum_of_work(timeline, costs)),
        num_empty=sum(share == 0 for share in shares),
        paces=tuple(costs.of_paces(schedule.num_ranks)),
    )


def _sum_of_work(timeline: Timeline, costs: Costs) -> float:
    """Return the total work of all ranks, independent of their speeds."""
    paces = costs.of_paces(len(timeline.busy))
    return sum(busy / pace for busy, pace in zip(timeline.busy, paces, strict=True))


def rank_forecasts(
    model: ModelCount,
    stages: Sequence[StageCount],
    schedule: Schedule,
    optimizer_states: int | OptimizerMemory,
    recomputed: Recomputed | None = None,
    shares: Sequence[float] = (),
    sharing: OptimizerSharing | None = None,
) -> tuple[RankForecast, ...]:
    """Return peak memory and sent bytes of each rank as `forecast` does, without simulating."""
    memory = replace(activation_memory(stages, recomputed), shares=shares)
    each = shares_of_each(shares, schedule.num_microbatches)
    peaks = zip(peak_memory(schedule, memory), peak_copies(schedule, memory), strict=True)
    return tuple(
        RankForecast(
            **vars(rank_states(model, stages, schedule.placement, rank, optimizer_states, sharing)),
            activation_bytes=round(peak),
            sent_bytes=_sum_sent(schedule.ranks[rank], stages, each),
            offloaded_bytes=round(copied),
        )
        for rank, (peak, copied) in enumerate(peaks)
    )


def peak_bytes_of_ranks(
    model: ModelCount,
    counts: Sequence[int],
    schedule: Schedule,
    optimizer_states: int | OptimizerMemory,
    recomputed: Recomputed | None = None,
    sharing: OptimizerSharing | None = None,
) -> list[int]:
    """Return the peak memory of each rank as `forecast` does, without simulating a step."""
    stages = count_stages(model, counts)
    peaks = peak_memory(schedule, activation_memory(stages, recomputed))
    states = partial(rank_states, model, stages, schedule.placement)
    return [
        states(rank, optimizer_states, sharing).with_activations(round(peak))
        for rank, peak in enumerate(peaks)
    ]


class MemoryLowerBound(NamedTuple):
    """Lower bound of a rank's memory: permanent bytes plus activations of one micro-batch."""

    lasting_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """Return the sum of permanent bytes and activation bytes."""
        return self.lasting_bytes + self.activation_bytes


def least_bytes(
    model: ModelCount,
    counts: Sequence[int],
    placement: Placement,
    optimizer_states: int | OptimizerMemory,
    sharing: OptimizerSharing | None = None,
) -> list[MemoryLowerBound]:
    """Return a lower bound of each rank's memory for any schedule, recomputation and offload.

    A backward needs the activations of its stage for one micro-batch, kept or recomputed.
    """
    stages = count_stages(model, counts)
    each = [min(stage.activation_bytes, stage.lives(stage.layers).full) for stage in stages]
    return [
        MemoryLowerBound(
            rank_states(model, stages, placement, rank, optimizer_states, sharing).total_bytes,
            max((each[stage] for stage in placement.stages_of(rank)), default=0),
        )
        for rank in range(placement.num_ranks)
    ]


def activation_memory(stages: Sequence[StageCount], recomputed: Recomputed | None = None) -> Memory:
    """Return the activation bytes of each stage per micro-batch, before and after recomputation."""
    if recomputed is None:
        recomputed = [stage.layers for stage in stages]
    lives = [stage.lives(own) for stage, own in zip(stages, recomputed, strict=True)]
    return Memory(
        forward=[stage.activation_bytes for stage in stages],
        boundary=[each.kept for each in lives],
        recompute=[each.full - each.kept for each in lives],
    )


def flop_costs(stages: Sequence[StageCount], recomputed: Recomputed | None = None) -> Costs:
    """Return the FLOPs of each op of each stage as its time, and the bytes of each transfer."""
    forward = [stage.forward_flops for stage in stages]
    again = forward
    if recomputed is not None:
        again = [stage.recompute_flops(own) for stage, own in zip(stages, recomputed, strict=True)]
    return Costs(
        forward=forward,
        backward=[stage.backward_flops for stage in stages],
        input_gradient=[stage.input_flops for stage in stages],
        weight_gradient=[stage.backward_flops - stage.input_flops for stage in stages],
        recompute=again,
        boundary_bytes=[sum(stage.output.tensors) for stage in stages],
        skip_bytes={
            (source, destination): sum(carried.tensors)
            for source, stage in enumerate(stages)
            for destination, carried in stage.sent.items()
        },
    )


def _sum_sent(row: Sequence[Action], stages: Sequence[StageCount], shares: Sequence[float]) -> int:
    """Return the bytes that a rank's actions send, for relative micro-batch sizes `shares`."""
    sends = ((action, action.microbatch) for action in row if action.op in SENDS)
    return round(
        sum(
            sent_bytes(send, stages) * shares[number]
            for send, number in sends
            if number is not None
        )
    )


def sent_bytes(action: Action, stages: Sequence[StageCount]) -> int:
    """Return the tensor bytes that an action sends to another rank; 0 if it is not a send."""
    stage, peer = stages[action.stage], action.peer
    if action.op is Op.SEND_F:
        return sum((stage.output if peer is None else stage.sent[peer]).tensors)
    if action.op is Op.SEND_B:
        return sum((stage.input if peer is None else stage.received[peer]).gradients)
    return 0


def lasting_bytes(
    model: ModelCount, layers: Iterable[int], optimizer_states: int | OptimizerMemory
) -> int:
    """Return the permanent bytes of a rank with some layers; see `RankStates.lasting_bytes`."""
    weights = model.weights(layers)
    held = sum(weight.nbytes + weight.cast_bytes for weight in weights)
    gradients = sum(weight.nbytes for weight in weights if weight.is_trained)
    memory = OptimizerMemory.of(optimizer_states)
    memory = memory.among(memory.replicas)
    states = memory.of_weights(weights)
    saving = 0 if memory.is_on_device else memory.saving_of(weights, memory.replicas, states)
    return held + gradients + states + memory.process_bytes + saving


def rank_states(
    model: ModelCount,
    stages: Sequence[StageCount],
    placement: Placement,
    rank: int,
    optimizer_states: int | OptimizerMemory,
    sharing: OptimizerSharing | None = None,
) -> RankStates:
    """Return the memory of a rank without activations; weights tied among its stages count once.

    With sharded optimizer state, the result is the maximum over the replicas.
    """
    held = placement.stages_of(rank)
    weights = model.weights(i for stage in held for i in stages[stage].layers)
    copies = min((len(placement.holders(stage)) for stage in held), default=1)
    trained = sum(weight.nbytes for weight in weights if weight.is_trained)
    memory = OptimizerMemory.of(optimizer_states)
    memory = memory.among(copies * memory.replicas)
    shared = ShardBytes(memory.of_weights(weights), 0)
    if sharing is not None:
        shared = sharing.of_rank(model, stages, placement, rank, memory)
    own_bytes, whole_bytes = shared.optimizer_bytes, memory.of_weights(weights)
    state_bytes = memory.state_of(weights, own_bytes)
    return RankStates(
        stages=held,
        parameters=sum(weight.num_elements for weight in weights),
        weight_bytes=sum(weight.nbytes for weight in weights) + shared.padding_bytes,
        cast_bytes=sum(weight.cast_bytes for weight in weights),
        gradient_bytes=trained + shared.padding_bytes,
        optimizer_bytes=shared.optimizer_bytes,
        workspace_bytes=max((stages[stage].workspace_bytes for stage in held), default=0),
        process_bytes=memory.process_bytes,
        update_bytes=memory.update_of(weights, own_bytes / whole_bytes if whole_bytes else 1.0),
        saving_bytes=memory.saving_of(weights, copies * memory.replicas, own_bytes),
        neighbour_bytes=NEIGHBOUR_STATES * state_bytes * memory.copies_to_neighbours,
        is_on_device=memory.is_on_device,
    )
