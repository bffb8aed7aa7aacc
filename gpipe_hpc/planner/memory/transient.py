"""What a stage takes while it runs a micro-batch, beside what it keeps."""

from collections.abc import Sequence

from gpipe_hpc.planner.costs.trial import Crossing, LayerCount


def stage_workspace(parts: Sequence[LayerCount], came: Crossing, left: Crossing) -> int:
    """Return the bytes that a stage takes at most beside all that it keeps of its micro-batches.

    `parts`: its layers, and the loss if that is part of it. `came` and `left`: what other stages
    send it and take from it; nothing at the ends of the model. Added to what layers take is what
    leaves: the output in a forward, its gradient in a backward. And one buffer for each that comes
    is posted ahead of the action that takes it. As a layer runs, what those behind it keep is not
    there: not yet in a forward, no longer in a backward.
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
    on_its_way = max(forward + sum(left.tensors), backward + sum(left.gradients))
    return on_its_way + sum(came.tensors) + sum(left.gradients)


def _only_passed(before: LayerCount, part: LayerCount) -> int:
    """Return the bytes that a layer gives the next one, and that neither keeps."""
    return sum(
        before.kept.sizes[slot]
        for position, slot in enumerate(before.kept.outputs)
        if slot not in before.kept.slots and position not in part.kept.slots
    )


def _made_and_kept(part: LayerCount, num_given: int) -> int:
    """Return what a layer makes and keeps itself, which goes with its own backward.

    The first slots are those of what it is given.
    """
    own = {*part.kept.outputs, *(slot for slots in part.kept.stashes for slot in slots)}
    kept = (slot for slot in own & part.kept.slots if slot >= num_given)
    return part.kept.inside + sum(part.kept.sizes[slot] for slot in kept)
