"""Bring a nest from one rank of a group to all of them."""

from gpipe_hpc.comm.group import Group, broadcast_object
from gpipe_hpc.comm.wire import Nest, assemble, disassemble
from gpipe_hpc.comm.world import World


def broadcast_nest(nest: Nest, group: Group, root: int, world: World) -> Nest:
    """Return world rank `root`'s nest on every rank of the group; its tensors need no grad."""
    structure, tensors = disassemble(nest)
    structure = broadcast_object(group, structure, root)
    if world.rank != root:
        tensors = [meta.allocate(world.device) for meta in structure.metas]
    for tensor in tensors:
        group.broadcast(tensor, root)
    result = assemble(structure, [tensor.contiguous() for tensor in tensors])
    return result
