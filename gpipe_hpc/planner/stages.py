"""From counted layers and a cut to what each stage costs, keeps and exchanges."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpipe_hpc.models import Skip, skip_routes
from gpipe_hpc.planner.costs.counted import ModelCount
from gpipe_hpc.planner.costs.trial import Crossing
from gpipe_hpc.planner.memory.storages import Follower, Lives, StageStorages
from gpipe_hpc.planner.memory.transient import stage_workspace


@dataclass(frozen=True)
class StageCount:
    """What one stage costs for one micro-batch.

    `forward_costs` are the FLOPs of each layer's forward; the loss belongs to the last layer.
    `input` and `output` cross the boundaries to the neighbours, what they stashed for each other
    included; `received` comes straight from stages further ahead, `sent` goes to those further on.
    `workspace_bytes` is what the stage takes while it runs beside what it keeps, libraries too.
    """

    layers: range
    forward_costs: tuple[int, ...]
    backward_flops: int
    input_flops: int
    storages: StageStorages
    input: Crossing
    output: Crossing
    received: Mapping[int, Crossing]
    sent: Mapping[int, Crossing]
    workspace_bytes: int

    @property
    def forward_flops(self) -> int:
        """Return the FLOPs of the forward."""
        return sum(self.forward_costs)

    @property
    def activation_bytes(self) -> int:
        """Return what lives from a forward that keeps everything to its backward.

        What two layers of the stage both keep counts once.
        """
        return self.storages.all_bytes

    def lives(self, recomputed: Collection[int]) -> Lives:
        """Return what lives of a micro-batch if these layers, by their index, are recomputed."""
        return self.storages.lives(self._positions(recomputed))

    def recompute_flops(self, recomputed: Collection[int]) -> int:
        """Return the FLOPs of running these layers, by their index, again."""
        return sum(self.forward_costs[i] for i in self._positions(recomputed))

    def _positions(self, recomputed: Collection[int]) -> frozenset[int]:
        return frozenset(index - self.layers.start for index in recomputed if index in self.layers)


def count_stages(model: ModelCount, counts: Sequence[int]) -> tuple[StageCount, ...]:
    """Return the costs of each stage of a cut into `counts` layers."""
    routes = skip_routes(model.skips, counts)
    return tuple(_count_stage(model, counts, routes, index) for index in range(len(counts)))


def count_span(model: ModelCount, start: int, stop: int) -> StageCount:
    """Return the costs of the layers from `start` to ahead of `stop` as a stage of its own."""
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
        + stage_workspace(
            parts,
            came=NOTHING.joined([*[from_before] * (start > 0), *received.values()]),
            left=NOTHING.joined([*[to_next] * (not is_last), *sent.values()]),
        ),
    )


NOTHING: Final = Crossing((), ())


def _behind(model: ModelCount, num_layers: int) -> Crossing:
    return model.layers[num_layers - 1].output if num_layers else model.inputs


def _joined(model: ModelCount, plain: Crossing, skips: Sequence[Skip]) -> Crossing:
    return plain.joined(map(model.carried, skips))


def _storages(
    model: ModelCount,
    span: range,
    boundary: Crossing,
    incoming: Mapping[int, Sequence[Skip]],
    is_last: bool,
) -> StageStorages:
    follower = Follower(boundary)
    for skips in incoming.values():
        for skip in skips:
            follower.receive(skip.name, model.carried(skip))
    for index in span:
        follower.run(model.layers[index], model.names[index])
    if model.loss is not None and is_last:
        follower.run_loss(model.loss)
    return follower.result()
