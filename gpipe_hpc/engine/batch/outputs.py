"""Bring a nest from one rank of a group to all of them."""

from gpipe_hpc.comm.group import Group, broadcast_object
from gpipe_hpc.comm.nests import Nest
from gpipe_hpc.comm.transport.wire import Structure, assemble, disassemble
from gpipe_hpc.comm.world import World


def broadcast_nest(nest: Nest, group: Group, root: int, world: World) -> Nest:
    """Return world rank `root`'s nest on every rank of the group; its tensors need no grad."""
    structure, tensors = disassemble(nest)
    structure = Structure.from_bytes(broadcast_object(group, structure.to_bytes(), root))
    if world.rank != root:
        tensors = [meta.allocate(world.device.torch) for meta in structure.metas]
    tensors = [tensor.contiguous() for tensor in tensors]
    for tensor in tensors:
        group.broadcast(tensor, root)
    return assemble(structure, tensors)
