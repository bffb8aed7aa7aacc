"""Compute cost, memory and exchanged tensors of each stage from counted layers and a partition."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpipe_hpc.models import Skip, skip_routes
from gpipe_hpc.planner.costs.counted import ModelCount
from gpipe_hpc.planner.costs.layer_trial import BoundaryBytes, LayerCount
from gpipe_hpc.planner.memory.storages import LifetimeBytes, StageStorages, StorageTracker


@dataclass(frozen=True)
class StageCount:
    """Counted cost of one stage for one micro-batch.

    Attributes:
      forward_costs: FLOPs of each layer's forward; the loss belongs to the last layer.
      input, output: values that cross the boundaries to neighbouring stages, including skips
        between them.
      received, sent: skip connections from and to stages that are not neighbours.
      workspace_bytes: temporary memory while the stage runs, including libraries.
    """

    layers: range
    forward_costs: tuple[int, ...]
    backward_flops: int
    input_flops: int
    storages: StageStorages
    input: BoundaryBytes
    output: BoundaryBytes
    received: Mapping[int, BoundaryBytes]
    sent: Mapping[int, BoundaryBytes]
    workspace_bytes: int

    @property
    def forward_flops(self) -> int:
        """Return the FLOPs of the forward."""
        return sum(self.forward_costs)

    @property
    def activation_bytes(self) -> int:
        """Return the bytes kept from forward to backward without recomputation.

        Storages that two layers of the stage keep count once.
        """
        return self.storages.all_bytes

    def lives(self, recomputed: Collection[int]) -> LifetimeBytes:
        """Return the live bytes of a micro-batch if the layers at these indices are recomputed."""
        return self.storages.lives(self._positions(recomputed))

    def recompute_flops(self, recomputed: Collection[int]) -> int:
        """Return the FLOPs of recomputing the layers with these indices."""
        return sum(self.forward_costs[i] for i in self._positions(recomputed))

    def _positions(self, recomputed: Collection[int]) -> frozenset[int]:
        return frozenset(index - self.layers.start for index in recomputed if index in self.layers)


def count_stages(model: ModelCount, counts: Sequence[int]) -> tuple[StageCount, ...]:
    """Return the costs of each stage; `counts` are the numbers of layers of the stages."""
    routes = skip_routes(model.skips, counts)
    return tuple(_count_stage(model, counts, routes, index) for index in range(len(counts)))


def count_span(model: ModelCount, start: int, stop: int) -> StageCount:
    """Return the costs of the layers `start` to `stop` (exclusive) as one stage."""
    counts = [start, stop - start, len(model.layers) - stop]
    if not counts[-1]:
        counts.pop()  # the loss belongs to the stage with the last layer
    return _count_stage(model, counts, skip_routes(model.skips, counts), 1)


def _count_stage(
    model: ModelCount,
    counts: Sequence[int],
    routes: Mapping[tuple[int, int], Sequence[Skip]],
    index: int,
) -> StageCount:
    start = sum(counts[:index])
    span = range(start, start + counts[index])
    is_last = index == len(counts) - 1
    incoming = {s: skips for (s, d), skips in routes.items() if d == index}
    outgoing = {d: skips for (s, d), skips in routes.items() if s == index}
    plain = _behind(model, start)
    parts = [model.layers[i] for i in span]
    costs = [part.forward_flops for part in parts]
    if model.loss is not None and is_last:
        parts.append(model.loss)
        costs[-1:] = [sum(costs[-1:]) + model.loss.forward_flops]
    storages = _storages(model, span, plain, incoming, is_last)
    from_before = _joined(model, plain, incoming.pop(index - 1, ()))
    to_next = _joined(model, _behind(model, span.stop), outgoing.pop(index + 1, ()))
    received = {s: _joined(model, NOTHING, skips) for s, skips in incoming.items()}
    sent = {d: _joined(model, NOTHING, skips) for d, skips in outgoing.items()}
    return StageCount(
        layers=span,
        forward_costs=tuple(costs),
        backward_flops=sum(part.backward_flops for part in parts),
        input_flops=sum(part.input_flops for part in parts),
        storages=storages,
        input=from_before,
        output=to_next,
        received=received,
        sent=sent,
        workspace_bytes=model.library_bytes
        + _stage_workspace(
            parts,
            incoming=NOTHING.joined([*[from_before] * (start > 0), *received.values()]),
            outgoing=NOTHING.joined([*[to_next] * (not is_last), *sent.values()]),
        ),
    )


NOTHING: Final = BoundaryBytes((), ())


def _behind(model: ModelCount, num_layers: int) -> BoundaryBytes:
    return model.layers[num_layers - 1].output if num_layers else model.inputs


def _joined(model: ModelCount, plain: BoundaryBytes, skips: Sequence[Skip]) -> BoundaryBytes:
    return plain.joined(map(model.carried, skips))


def _storages(
    model: ModelCount,
    span: range,
    boundary: BoundaryBytes,
    incoming: Mapping[int, Sequence[Skip]],
    is_last: bool,
) -> StageStorages:
    tracker = StorageTracker(boundary)
    for skips in incoming.values():
        for skip in skips:
            tracker.receive(skip.name, model.carried(skip))
    for index in span:
        tracker.run(model.layers[index], model.names[index])
    if model.loss is not None and is_last:
        tracker.run_loss(model.loss)
    return tracker.result()


def _stage_workspace(
    parts: Sequence[LayerCount], incoming: BoundaryBytes, outgoing: BoundaryBytes
) -> int:
    """Return the peak bytes that a stage needs in addition to the activations that it keeps.

    The sum of the workspace of layers, the value being sent (the output in a forward, its gradient
    in a backward), and one posted receive buffer for each value that arrives. While a layer runs,
    the saved tensors of later layers are not alive: not yet in a forward, no longer in a backward.

    Args:
      parts: layers of the stage, and the loss if it belongs to the stage.
      incoming, outgoing: values exchanged with other stages; empty at the ends of the model.
    """
    later = forward = backward = 0
    for place in reversed(range(len(parts))):
        part = parts[place]
        is_end = place == len(parts) - 1
        passed = _only_passed(parts[place - 1], part) if place else 0
        gradients = 0 if is_end else sum(part.output.gradients)
        forward = max(forward, part.workspace.forward + passed - later)
        backward = max(backward, part.workspace.backward + gradients - later)
        later += _made_and_kept(part, len(parts[place - 1].output.tensors) if place else 0)
    on_its_way = max(forward + sum(outgoing.tensors), backward + sum(outgoing.gradients))
    return on_its_way + sum(incoming.tensors) + sum(outgoing.gradients)


def _only_passed(before: LayerCount, part: LayerCount) -> int:
    """Return the bytes of a layer's output that neither this layer nor the next one saves."""
    return sum(
        before.kept.sizes[slot]
        for position, slot in enumerate(before.kept.outputs)
        if slot not in before.kept.slots and position not in part.kept.slots
    )


def _made_and_kept(part: LayerCount, num_given: int) -> int:
    """Return the bytes that a layer creates and saves, which its own backward frees.

    The first `num_given` slots are those of the layer's inputs.
    """
    own = {*part.kept.outputs, *(slot for slots in part.kept.stashes for slot in slots)}
    kept = (slot for slot in own & part.kept.slots if slot >= num_given)
    return part.kept.inside + sum(part.kept.sizes[slot] for slot in kept)
