"""Groups of many ranks on an accelerator: few connections, and each tensor goes its own way."""

from collections import Counter

import torch
import torch.distributed as dist

from gpipe_hpc.comm.collectives.bruck import partners
from gpipe_hpc.comm.collectives.group import PeerTensor
from gpipe_hpc.comm.collectives.plan import PlanPosition
from gpipe_hpc.comm.collectives.planned import start_ring_all_reduce
from gpipe_hpc.comm.collectives.two_sided import TwoSidedGroup
from gpipe_hpc.comm.watchdog.store_exchange import StoreExchange
from gpipe_hpc.comm.world import processes as module
from gpipe_hpc.comm.world.processes import ProcessWorld
from gpipe_hpc.device.device import HostDevice

SIZE = 8


class StandIn(HostDevice):
    """A device with a backend of its own; what lies on it bears a mark."""

    is_accelerator, type, backend = True, "xpu", "standin"

    def holds(self, tensor):
        return hasattr(tensor, "is_on_device")

    def to_host(self, tensor):
        return tensor.clone()


def on_device(*values, dtype=torch.float32):
    tensor = torch.tensor(values, dtype=dtype)
    tensor.is_on_device = True
    return tensor


class OwnBackend(dist.ProcessGroup):
    """What stands for NCCL: it is connected with nobody, and moves all by way of the store.

    It knows no float64, as some of these backends.
    """

    def __init__(self, options, _):
        super().__init__(options.group_rank, options.group_size)
        self._store, self._place = options.store, (options.group_rank, options.group_size)
        self._turns = Counter()
        self.calls = Counter()
        self._set_group_name(options.group_id)
        self._set_group_desc("undefined")

    def allreduce(self, tensors, options):
        (tensor,) = tensors
        if tensor.dtype is torch.float64:
            raise TypeError("float64 is unknown here")
        reduced = torch.stack(self._all(tensor))
        most = options.reduceOp == dist.ReduceOp.MAX
        tensor.copy_(reduced.amax(0) if most else reduced.sum(0))
        return self._done("allreduce")

    def broadcast(self, tensors, options):
        (tensor,) = tensors
        tensor.copy_(self._all(tensor)[options.rootRank])
        return self._done("broadcast")

    def send(self, tensors, peer, tag):
        self._put(f"{self._place[0]} to {peer}, {tag}", tensors[0])
        return self._done("send")

    def recv(self, tensors, peer, tag):
        line, tensor = f"{peer} to {self._place[0]}, {tag}", tensors[0]
        return self._done("recv", lambda: tensor.copy_(self._take(line, tensor)))

    def _all(self, tensor):
        rank, size = self._place
        self._put(f"of {rank}", tensor)
        return [self._take(f"of {r}", tensor, taker=r) for r in range(size)]

    def _put(self, line, tensor):
        self._turns["put", line] += 1
        text = ",".join(map(str, tensor.reshape(-1).tolist()))
        self._store.set(f"{line}, {self._turns['put', line]}", text)

    def _take(self, line, like, taker=None):
        self._turns["take", line, taker] += 1
        text = self._store.get(f"{line}, {self._turns['take', line, taker]}").decode()
        return torch.tensor([float(each) for each in text.split(",")]).to(like.dtype).view_as(like)

    def _done(self, name, at_wait=lambda: None):
        self.calls[name] += 1
        return Ended(at_wait)


class Ended(dist.Work):
    def __init__(self, at_wait):
        super().__init__()
        self._at_wait = at_wait

    def wait(self, timeout=None):
        self._at_wait()
        return True


def joined(meshed):
    """Return a world on the stand-in, ranks of Gloo groups made since, and who was asked for."""
    dist.Backend.register_backend("standin", OwnBackend, extended_api=True, devices=["xpu"])
    module._is_carried = lambda device: True
    meshes, asked = [], []
    gloo, ask = dist.ProcessGroupGloo, StoreExchange.collect

    class Seen(gloo):
        def __init__(self, store, rank, size, *rest, **named):
            meshes.append(size)
            super().__init__(store, rank, size, *rest, **named)

    def seen(self, what, ranks):
        asked.append((what, len(ranks)))
        return ask(self, what, ranks)

    dist.ProcessGroupGloo, StoreExchange.collect = Seen, seen
    return ProcessWorld(StandIn(), 60.0, meshed=meshed), meshes, asked


def body_of_connections(rank):
    world, meshes, asked = joined(meshed=3)
    asked.clear()
    group = world.group([range(SIZE)])
    assert isinstance(group, TwoSidedGroup)
    assert 2 in meshes, "each connection was seen"
    rounds = [num for what, num in asked if "places on" in what]
    return (
        [size for size in meshes if size > 2],
        world._wide_pairs[-1].num_connected,
        rounds,
        sum(num for _, num in asked),
    )


def test_no_rank_connects_with_all_nor_asks_for_all(processes, tmp_path):
    """The Gloo half of NCCL's groups was a mesh: 4,095 connections of each of 4,096 copies."""
    near = len(partners(PlanPosition(SIZE, 0)))
    assert near == 5
    # Each connection asks for its other end; the backend's own group for three in turn.
    expected = ([], near, [1, 1, 1], near + 3)
    assert processes(SIZE, body_of_connections, tmp_path) == [expected] * SIZE


def body_of_ways(rank):
    world, *_ = joined(meshed=3)
    group = world.group([range(SIZE)])
    own = group.torch_group
    found = {}

    def on(what, call):
        before = own.calls.total()
        found[what] = call(), own.calls.total() > before

    def summed(tensor, act):
        act(tensor)
        return tensor.tolist()

    def gathered(make):
        """Return a vector of shards, the first of two elements, of which this rank has its own."""
        return make(*[rank + 1 if max(0, at - 1) == rank else 0 for at in range(SIZE + 1)])

    def exchanged(tensor):
        ends = (rank + 1) % SIZE, (rank - 1) % SIZE
        group.start_exchange([PeerTensor(ends[0], tensor)], [PeerTensor(ends[1], came)]).wait()
        return came.tolist()

    on("sum on the device", lambda: summed(on_device(rank, 1), group.all_reduce))
    on("sum on the host", lambda: summed(torch.tensor([rank, 1.0]), group.all_reduce))
    on("greatest on the device", lambda: summed(on_device(rank, -rank), group.all_reduce_max))
    on("greatest on the host", lambda: summed(torch.tensor([rank]), group.all_reduce_max))
    wide = {"dtype": torch.float64}
    group.all_reduce(on_device(1, **wide))  # finds out that the backend has none
    on("what the backend lacks", lambda: summed(on_device(rank, **wide), group.all_reduce))
    on("the greatest of it", lambda: summed(on_device(rank, **wide), group.all_reduce_max))
    on("broadcast", lambda: summed(on_device(rank), lambda t: group.broadcast(t, 3)))
    on(
        "broadcast on the host",
        lambda: summed(torch.tensor([rank]), lambda t: group.broadcast(t, 3)),
    )
    ordered = group.start_ordered_all_reduce
    on("in the order of ranks", lambda: summed(on_device(rank), lambda t: ordered(t).wait()))

    def ring(tensor):
        start_ring_all_reduce(group, tensor).wait()

    on("by a plan", lambda: summed(on_device(*[rank] * SIZE), ring))
    on("by a plan on the host", lambda: summed(torch.tensor([rank] * SIZE), ring))
    shares = [2] + [1] * (SIZE - 1)
    on("gathering", lambda: summed(gathered(on_device), lambda t: group.all_gather(t, shares)))
    host = gathered(lambda *values: torch.tensor(values))
    on("gathering on the host", lambda: summed(host, lambda t: group.all_gather(t, shares)))
    vector = on_device(*[rank] * (SIZE + 1))
    on("all to all", lambda: [t.tolist() for t in group.all_to_all(vector, shares)])
    came = torch.zeros(1)
    on("exchange on the host", lambda: exchanged(torch.tensor([float(rank)])))
    on("objects", lambda: group.all_gather_object(f"rank {rank}"))
    return found


def body_of_sent(rank):
    world, *_ = joined(meshed=3)
    group = world.group([range(SIZE)])
    started = group.sent.num_messages, group.sent.num_bytes
    start_ring_all_reduce(group, on_device(*[rank] * SIZE)).wait()
    return group.sent.num_messages - started[0], group.sent.num_bytes - started[1]


def test_greetings_are_no_part_of_what_was_sent(processes, tmp_path):
    """They went over the other half, which took them for a message of its caller."""
    rounds = 2 * (SIZE - 1)
    assert processes(SIZE, body_of_sent, tmp_path) == [(rounds, 4 * rounds)] * SIZE


def test_what_lies_on_the_device_goes_over_its_own_backend(processes, tmp_path):
    for rank, found in enumerate(processes(SIZE, body_of_ways, tmp_path)):
        assert found == {
            "sum on the device": ([28, 8], True),
            "sum on the host": ([28, 8], False),
            "greatest on the device": ([7, 0], True),
            "greatest on the host": ([7], False),
            "what the backend lacks": ([28], False),
            "the greatest of it": ([7], False),
            "broadcast": ([3], True),
            "broadcast on the host": ([3], False),
            "in the order of ranks": ([28], True),
            "by a plan": ([28] * SIZE, True),
            "by a plan on the host": ([28] * SIZE, False),
            "gathering": ([1, *range(1, SIZE + 1)], True),
            "gathering on the host": ([1, *range(1, SIZE + 1)], False),
            "all to all": ([[r] * (1 if rank else 2) for r in range(SIZE)], True),
            "exchange on the host": ([(rank - 1) % SIZE], False),
            "objects": ([f"rank {each}" for each in range(SIZE)], False),
        }
