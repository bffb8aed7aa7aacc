"""Program for ranks of mpiexec: `program.py FOLDER PART ...`; each rank saves its results."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gpipe_hpc.comm.world.mpi.library as mpi_library
from gpipe_hpc import LayerSpec, Pipeline
from gpipe_hpc.comm.world.start import start_world
from tests.comm.collectives.starts import ALL_REDUCES
from tests.simulated.scenarios import ALL, train
from tests.support import batches, mean_square, train_rank

KINDS = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.int64, torch.int8, torch.uint8, torch.bool),
)
SIZES = (1, 7, 20_003)  # long tensors use another algorithm


def drawn(rank: int, size: int, kind: torch.dtype) -> Tensor:
    """Return the random input of a rank."""
    numbers = 3 * torch.randn(size, generator=torch.Generator().manual_seed(rank))
    return numbers > 0 if kind is torch.bool else numbers.to(kind)


def sums(world: Any, folder: Path) -> dict[str, Tensor]:
    """All-reduce and broadcast tensors of each dtype, also split into many messages."""
    group = world.group([range(world.size)])
    found = {}
    for kind in KINDS:
        for size in SIZES:
            found[f"sum {kind} {size}"] = own = drawn(world.rank, size, kind)
            group.all_reduce(own)
            found[f"broadcast {kind} {size}"] = other = drawn(world.rank, size, kind)
            group.broadcast(other, world.size - 1)
    whole, mpi_library.MOST_BYTES = mpi_library.MOST_BYTES, 1000
    found["in parts"] = own = drawn(world.rank, 20_003, torch.float64)
    group.all_reduce(own)
    mpi_library.MOST_BYTES = whole
    found["apart"] = apart = drawn(world.rank, 9, torch.float32).t()
    grid = drawn(world.rank, 9, torch.float32).view(3, 3).t()  # not contiguous
    group.all_reduce(grid)
    found["turned"], apart[:] = grid, grid.reshape(-1)
    for name, start in ALL_REDUCES.items():
        found[name] = own = torch.arange(1000.0) + world.rank
        start(group, own).wait()
    found["max"] = own = torch.arange(5.0) * (-1) ** world.rank
    group.all_reduce_max(own)
    return found


def calls(world: Any, folder: Path) -> dict[str, Any]:
    """Call all collectives of torch.distributed, and DistributedDataParallel."""
    group = world.group([range(world.size)]).torch_group
    rank, size = world.rank, world.size
    own = torch.arange(4.0) + rank
    found: dict[str, Any] = {}

    found["average"] = average = own.clone()
    dist.all_reduce(average, op=dist.ReduceOp.AVG, group=group)
    found["reduce"] = reduced = own.clone()
    dist.reduce(reduced, 1, group=group)
    found["all_gather"] = gathered = [torch.empty(4) for _ in range(size)]
    dist.all_gather(gathered, own, group=group)
    found["all_gather_single"] = together = torch.empty(4 * size)
    dist.all_gather_single(together, own, group=group)
    found["reduce_scatter"] = part = torch.empty(2)
    dist.reduce_scatter(part, [torch.full((2,), 10.0 * i + rank) for i in range(size)], group=group)
    found["reduce_scatter_single"] = single = torch.empty(3)
    dist.reduce_scatter_single(single, torch.arange(3.0 * size) * (rank + 1), group=group)
    found["gather"] = at_root = [torch.empty(4) for _ in range(size)] if rank == 1 else None
    dist.gather(own, at_root, dst=1, group=group)
    found["scatter"] = dealt = torch.empty(2)
    cards = [torch.full((2,), float(i)) for i in range(size)] if rank == 0 else None
    dist.scatter(dealt, cards, src=0, group=group)
    found["all_to_all_single"] = swapped = torch.empty(size)
    dist.all_to_all_single(swapped, torch.arange(float(size)) + 10 * rank, group=group)
    found["all_to_all"] = received = [torch.empty(rank + 1) for _ in range(size)]
    given = [torch.full((i + 1,), float(rank)) for i in range(size)]
    dist.all_to_all(received, given, group=group)
    dist.barrier(group=group)
    found["objects"] = objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    found["ring"] = before = torch.empty(4)
    ring = [
        dist.P2POp(dist.isend, own, (rank + 1) % size, group),
        dist.P2POp(dist.irecv, before, (rank - 1) % size, group),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    at = torch.tensor([[rank, size]])
    sparse = torch.sparse_coo_tensor(
        at, torch.tensor([1.0, 2.0]), (size + 1,), check_invariants=True
    )
    dist.all_reduce(sparse, group=group)
    found["sparse"] = sparse.to_dense()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2), process_group=group)
    model(torch.full((2, 3), float(rank))).sum().backward()
    found["ddp"] = model.module.weight.grad
    return found


def trainings(world: Any, folder: Path) -> dict[str, Any]:
    """Train the scenarios of the simulated devices (tests/simulated) on the CPU over MPI."""
    chosen = [each for each in ALL if each.ranks == world.size and each.way is None]
    return {str(scenario): train(scenario, world) for scenario in chosen}


def make(world: Any, **options: Any) -> Pipeline:
    """Return the pipeline for checkpoints."""
    layers = [LayerSpec(nn.Linear, 4, 4, dtype=torch.float64) for _ in range(8)]
    return Pipeline(layers, mean_square, world=world, microbatches=4, seed=3, **options)


def checkpoints(world: Any, folder: Path) -> dict[str, Any]:
    """Save after two steps and train two more; load into another layout and train the same two."""
    pipe = make(world, stages=2, replicas=world.size // 2)
    data = batches(4)
    train_rank(pipe, data[:2], 0.1)
    pipe.save(folder / "saved")
    on = train_rank(pipe, data[2:], 0.1)
    other = make(world, stages=world.size, schedule="one_f_one_b")
    other.load(folder / "saved")
    again = train_rank(other, data[2:], 0.1)
    return {"on": on, "again": again}


def sockets() -> dict[str, int]:
    """Return the numbers of listening and of connected TCP sockets of this process."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        target = os.readlink(entry) if entry.is_symlink() else ""
        if target.startswith("socket:["):
            own.add(target[8:-1])
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    states = [fields[3] for fields in lines if fields[9] in own]
    return {"listening": states.count("0A"), "connected": states.count("01")}


PARTS: dict[str, Callable[[Any, Path], Any]] = {
    each.__name__: each for each in (sums, calls, trainings, checkpoints)
}


def main() -> None:
    """Run the parts given on the command line."""
    folder, *parts = sys.argv[1:]
    world = start_world(backend="mpi", shares_memory=False, timeout_s=90)
    before = sockets()
    found = {part: PARTS[part](world, Path(folder)) for part in parts}
    found["sockets"] = [before, sockets()]
    found["groups"] = {dist.get_backend(group) for group in dist.distributed_c10d._world.pg_map}
    torch.save(found, Path(folder) / f"rank{world.rank}.pt")


if __name__ == "__main__":
    main()
