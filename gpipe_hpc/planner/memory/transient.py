"""Temporary memory of a stage while it runs a micro-batch."""

from collections.abc import Sequence

from gpipe_hpc.planner.costs.layer_trial import BoundaryBytes, LayerCount


def stage_workspace(
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
