"""From counted layers, a cut and a schedule to what each rank holds, sends and waits for."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpipe_hpc.planning.counted import Crossing, LayerCount, ModelCount
from gpipe_hpc.planning.partition import stage_layers
from gpipe_hpc.schedule import Costs, Memory, Op, Schedule, Timeline, peak_memory, simulate


@dataclass(frozen=True)
class StageCount:
    """What one stage costs for one micro-batch.

    `activation_bytes` lives from a forward that keeps everything to its backward; what two layers
    of the stage both keep counts once. The loss belongs to the last stage.
    """

    layers: range
    forward_flops: int
    backward_flops: int
    input_flops: int
    activation_bytes: int
    input: Crossing
    output: Crossing

    @property
    def boundary_bytes(self) -> int:
        """Return what lives of a micro-batch that will be recomputed: the input alone."""
        return sum(self.input.tensors)


@dataclass(frozen=True)
class RankForecast:
    """What one rank holds at its fullest, and sends to other ranks in a step; bytes."""

    stages: tuple[int, ...]
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    sent_bytes: int

    @property
    def total_bytes(self) -> int:
        """Return the sum of weights, gradients, optimizer and activations."""
        states = self.weight_bytes + self.gradient_bytes + self.optimizer_bytes
        return states + self.activation_bytes


@dataclass(frozen=True)
class Forecast:
    """One step of one replica, as counted and simulated; times in units of one FLOP."""

    stages: tuple[StageCount, ...]
    ranks: tuple[RankForecast, ...]
    timeline: Timeline
    step_flops: int  # of all ranks, recomputation included


def forecast(
    model: ModelCount, counts: Sequence[int], schedule: Schedule, optimizer_states: int
) -> Forecast:
    """Forecast one step of a model cut into stages of `counts` layers under a lowered schedule.

    `optimizer_states` is how many numbers the optimizer keeps for each trained parameter.
    Transfers and the reduction over replicas take no time.
    """
    stages = count_stages(model, counts)
    memory = Memory(
        forward=[stage.activation_bytes for stage in stages],
        boundary=[stage.boundary_bytes for stage in stages],
    )
    peaks = peak_memory(schedule, memory)
    timeline = simulate(schedule, flop_costs(stages))
    return Forecast(
        stages=stages,
        ranks=tuple(
            _rank(model, stages, schedule, rank, round(peak), optimizer_states)
            for rank, peak in enumerate(peaks)
        ),
        timeline=timeline,
        step_flops=round(sum(timeline.busy)),
    )


def count_stages(model: ModelCount, counts: Sequence[int]) -> tuple[StageCount, ...]:
    """Return the costs of each stage of a cut into `counts` layers."""
    stages: list[StageCount] = []
    boundary = model.inputs
    for index, span in enumerate(stage_layers(counts)):
        parts = [model.layers[i] for i in span]
        output = parts[-1].output if parts else boundary
        if model.loss is not None and index == len(counts) - 1:
            parts.append(model.loss)
        stages.append(
            StageCount(
                layers=span,
                forward_flops=sum(part.forward_flops for part in parts),
                backward_flops=sum(part.backward_flops for part in parts),
                input_flops=sum(part.input_flops for part in parts),
                activation_bytes=_activation_bytes(parts, boundary),
                input=boundary,
                output=output,
            )
        )
        boundary = output
    return tuple(stages)


def flop_costs(stages: Sequence[StageCount]) -> Costs:
    """Return the FLOPs of each op of a stage as its time."""
    forward = [stage.forward_flops for stage in stages]
    return Costs(
        forward=forward,
        backward=[stage.backward_flops for stage in stages],
        input_gradient=[stage.input_flops for stage in stages],
        weight_gradient=[stage.backward_flops - stage.input_flops for stage in stages],
        recompute=forward,
    )


def _activation_bytes(parts: Sequence[LayerCount], boundary: Crossing) -> int:
    """Follow each storage from layer to layer, and add up those that any layer keeps."""
    sizes = list(boundary.tensors)
    storages = list(range(len(sizes)))  # that of each tensor on its way
    # A stage holds on to the tensors whose gradients it will send back.
    kept = {i for i, nbytes in zip(storages, boundary.gradients, strict=True) if nbytes}
    inside = 0
    for part in parts:
        made = part.kept.sizes[len(storages) :]
        slots = [*storages, *range(len(sizes), len(sizes) + len(made))]
        sizes += made
        kept |= {slots[slot] for slot in part.kept.slots}
        inside += part.kept.inside
        storages = [slots[slot] for slot in part.kept.outputs]
    return inside + sum(sizes[i] for i in kept)


def _rank(
    model: ModelCount,
    stages: Sequence[StageCount],
    schedule: Schedule,
    rank: int,
    activation_bytes: int,
    optimizer_states: int,
) -> RankForecast:
    held = schedule.placement.stages_of(rank)
    weights = model.weights(i for stage in held for i in stages[stage].layers)
    trained = sum(weight.nbytes for weight in weights if weight.is_trained)
    sent = 0
    for op, stage, _ in schedule.ranks[rank]:
        if op is Op.SEND_F:
            sent += sum(stages[stage].output.tensors)
        elif op is Op.SEND_B:
            sent += sum(stages[stage].input.gradients)
    return RankForecast(
        stages=held,
        parameters=sum(weight.num_elements for weight in weights),
        weight_bytes=sum(weight.nbytes for weight in weights),
        gradient_bytes=trained,
        optimizer_bytes=optimizer_states * trained,
        activation_bytes=activation_bytes,
        sent_bytes=sent,
    )
