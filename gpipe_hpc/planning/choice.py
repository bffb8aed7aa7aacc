"""Choose the cut that a user asked for."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from gpipe_hpc.errors import PartitionError
from gpipe_hpc.models import Layer, layer_parameters, stage_layers
from gpipe_hpc.planning.measured import LossFunction, measure_layers
from gpipe_hpc.planning.partition import by_hand, minimax, uniform
from gpipe_hpc.schedule import Costs

POLICIES = ("parameters", "uniform", "time")


class Partition(NamedTuple):
    """A cut, and what it was made by."""

    counts: tuple[int, ...]  # layers of each stage
    costs: tuple[float, ...]  # one number a layer
    measure: str  # the unit of the costs
    # Where measured, of each layer: forward, backward, and the two halves of a split backward.
    seconds: tuple[tuple[float, float, float, float], ...] = ()

    def stage_costs(self) -> Costs | None:
        """Return the measured seconds of each op of a stage; None if nothing was measured."""
        if not self.seconds:
            return None
        spans = [[self.seconds[i] for i in span] for span in stage_layers(self.counts)]
        forward, backward, inputs, weights = (
            [sum(layer[part] for layer in span) for span in spans] for part in range(4)
        )
        return Costs(
            forward=forward,
            backward=backward,
            input_gradient=inputs,
            weight_gradient=weights,
            recompute=forward,
        )


class Example(NamedTuple):
    """One micro-batch to measure layers on; loss_fn(output, targets) ends it."""

    inputs: Any
    targets: Any
    loss_fn: LossFunction
    seed: int
    device: torch.device


def choose_partition(
    policy: str | Sequence[int] | Partition,
    layers: Sequence[Layer],
    num_stages: int,
    example: Callable[[], Example | None],
) -> Partition:
    """Cut `layers` into `num_stages` by parameters, uniform, time, or as given by hand.

    A Partition that was made before, in a checkpoint say, is taken as it is where it fits the
    layers and the stages; else the cut is made anew, as that one was.
    `example` is called for `time` alone, which measures every layer's forward and backward on
    it, here and now: ask one rank, and tell the others. Raises PartitionError.
    """
    if isinstance(policy, Partition):
        cut = tuple(policy.counts)
        if (len(cut), sum(cut)) == (num_stages, len(layers)):
            return policy._replace(counts=cut)
        policy = "uniform" if policy.measure == "layers" else policy.measure
    if not isinstance(policy, str):
        # A zero written by hand asks for an empty stage: it passes its input on.
        counts = by_hand(policy, len(layers), num_stages, allow_empty=True)
        return Partition(tuple(counts), tuple(map(float, layer_parameters(layers))), "parameters")
    if policy == "parameters":
        sizes = layer_parameters(layers)
        return Partition(tuple(minimax(sizes, num_stages)), tuple(map(float, sizes)), policy)
    if policy == "uniform":
        return Partition(tuple(uniform(len(layers), num_stages)), (1.0,) * len(layers), "layers")
    if policy != "time":
        raise PartitionError(
            f"partition: unknown, expected one of {', '.join(POLICIES)} or the number of layers "
            f"of each stage, got {policy!r}"
        )
    uniform(len(layers), num_stages)  # refuse too many stages before measuring
    given = example()
    if given is None:
        raise PartitionError(
            "partition: 'time' measures layers on one micro-batch, expected example=(inputs, "
            "targets), got none; pass it, or use partition='parameters'"
        )
    measured = measure_layers(
        layers, given.inputs, given.targets, given.loss_fn, seed=given.seed, device=given.device
    )
    costs = [cost.total_s for cost in measured]
    seconds = tuple((c.forward_s, c.backward_s, c.input_s, c.weight_s) for c in measured)
    return Partition(tuple(minimax(costs, num_stages)), tuple(costs), "time", seconds)
