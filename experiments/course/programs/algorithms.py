"""Four algorithms for an all-reduce, built from sends and receives; for exercise 3.

    torchrun --standalone --nproc_per_node 4 -m experiments.course.programs.algorithms

Rank 0 prints a line of JSON: for each algorithm and size, the most messages and bytes that a rank
sends and the seconds of each round; and the seconds of messages between two ranks.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

SIZES: Final = (1 << 10, 1 << 14, 1 << 18, 1 << 22)
ROUNDS: Final = 9
CALLS: Final = 5  # calls per round, one after the other, which share the wait for the first


class Wire:
    """Sends and receives tensors, and counts what this rank has sent."""

    def __init__(self) -> None:
        self.num_messages = 0
        self.num_bytes = 0

    def send(self, values: Tensor, to: int) -> dist.Work:
        self.num_messages += 1
        self.num_bytes += values.numel() * values.element_size()
        work = dist.isend(values, to)
        assert work is not None, "isend of a member of the group returns a handle"
        return work

    def exchange(self, values: Tensor, to: int, into: Tensor, source: int) -> None:
        """Send to one rank while receiving from another (or the same) one."""
        work = self.send(values, to)
        dist.recv(into, source)
        work.wait()


def ring(wire: Wire, values: Tensor, ranks: list[int]) -> None:
    """Pieces travel around the ring twice: to be added up, and to be handed out."""
    num, me = len(ranks), ranks.index(dist.get_rank())
    right, left = ranks[(me + 1) % num], ranks[(me - 1) % num]
    pieces = list(values.tensor_split(num))
    for step in range(num - 1):
        into = torch.empty_like(pieces[(me - step - 1) % num])
        wire.exchange(pieces[(me - step) % num], right, into, left)
        pieces[(me - step - 1) % num] += into
    for step in range(num - 1):
        wire.exchange(pieces[(me + 1 - step) % num], right, pieces[(me - step) % num], left)


def recursive_doubling(wire: Wire, values: Tensor, ranks: list[int]) -> None:
    """In each step two ranks exchange all they have; the distance doubles."""
    me, distance = ranks.index(dist.get_rank()), 1
    while distance < len(ranks):
        into = torch.empty_like(values)
        wire.exchange(values, ranks[me ^ distance], into, ranks[me ^ distance])
        values += into
        distance *= 2


def tree(wire: Wire, values: Tensor, ranks: list[int]) -> None:
    """Sums travel up a binomial tree to the first rank, and the total travels down."""
    num, me, distance = len(ranks), ranks.index(dist.get_rank()), 1
    into = torch.empty_like(values)
    while distance < num and not me & distance:
        dist.recv(into, ranks[me + distance])
        values += into
        distance *= 2
    if me:
        wire.send(values, ranks[me - distance]).wait()
        dist.recv(values, ranks[me - distance])
    while distance > 1:
        distance //= 2
        wire.send(values, ranks[me + distance]).wait()


def hierarchy(wire: Wire, values: Tensor, ranks: list[int]) -> None:
    """Pairs of ranks are hosts: reduce to a host's first rank, a ring over these, and back."""
    me = dist.get_rank()
    leader = me - me % 2
    if me != leader:
        wire.send(values, leader).wait()
        dist.recv(values, leader)
        return
    into = torch.empty_like(values)
    dist.recv(into, me + 1)
    values += into
    ring(wire, values, ranks[::2])
    wire.send(values, me + 1).wait()


ALGORITHMS: Final[dict[str, Callable[[Wire, Tensor, list[int]], None]]] = {
    "ring": ring,
    "recursive doubling": recursive_doubling,
    "tree": tree,
    "hierarchy": hierarchy,
}


def measure(call: Callable[[], None]) -> list[float]:
    """Return the seconds of each round on the slowest rank, without the first round."""
    times = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        slowest = torch.tensor((time.perf_counter() - began) / CALLS)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(float(slowest))
    return times[1:]


def ping(values: Tensor) -> None:
    """Send from rank 0 to rank 1 and back."""
    if dist.get_rank() == 0:
        dist.send(values, 1)
        dist.recv(values, 1)
    elif dist.get_rank() == 1:
        dist.recv(values, 0)
        dist.send(values, 0)


def main() -> None:
    """Check and time all algorithms; print the results on rank 0."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    num, me = dist.get_world_size(), dist.get_rank()
    found: dict[str, Any] = {"ranks": num, "algorithms": [], "messages": []}
    for size in SIZES:
        message = torch.zeros(size // 4)
        seconds = [both_ways / 2 for both_ways in measure(partial(ping, message))]
        found["messages"].append({"bytes": size, "seconds": seconds})
        for name, algorithm in ALGORITHMS.items():
            values = torch.arange(size // 4, dtype=torch.float32) % 100 + me
            expected = torch.arange(size // 4) % 100 * num + num * (num - 1) / 2
            wire = Wire()
            algorithm(wire, values, list(range(num)))
            assert torch.equal(values, expected), f"{name} gave a wrong sum"
            most = torch.tensor([wire.num_messages, wire.num_bytes])
            dist.all_reduce(most, dist.ReduceOp.MAX)
            seconds = measure(partial(algorithm, Wire(), values, list(range(num))))
            counts = {"messages": int(most[0]), "sent_bytes": int(most[1])}
            found["algorithms"].append({"name": name, "bytes": size, "seconds": seconds} | counts)
    if me == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
