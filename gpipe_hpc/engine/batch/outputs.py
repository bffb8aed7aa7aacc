"""Bring a nest from one rank of a group to all of them."""

from gpipe_hpc.comm.group import Gathering
from gpipe_hpc.comm.nests import Nest
from gpipe_hpc.comm.transport.wire import Structure, as_bytes, assemble, disassemble, packed
from gpipe_hpc.comm.world import World


def broadcast_nest(nest: Nest, group: Gathering, root: int, world: World) -> Nest:
    """Return world rank `root`'s nest on every rank of the group; its tensors need no grad."""
    structure, tensors = disassemble(nest, world.device)
    structure = Structure.from_bytes(group.broadcast_object(structure.to_bytes(), root))
    if world.rank != root:
        tensors = [meta.allocate(world.device) for meta in structure.metas]
    tensors = [packed(*each) for each in zip(tensors, structure.metas, strict=True)]
    for tensor in tensors:
        if tensor.numel():
            group.broadcast(as_bytes(tensor), root)
    return assemble(structure, tensors)
