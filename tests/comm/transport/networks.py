"""In-memory networks with the semantics of real ones, and a device that delays copies.

A send completes once its receive is posted. Sends and receives of a lane match in the order in
which they are started, and must have the same size.
"""

import threading
from collections import defaultdict, deque
from contextlib import contextmanager

import torch

from gpipe_hpc.comm.transport.outbox import Outbox
from gpipe_hpc.comm.transport.payload import Payload
from gpipe_hpc.comm.transport.process import ChannelEnd, ProcessTransport
from gpipe_hpc.comm.world.threads import ThreadWorld
from gpipe_hpc.device.device import HostDevice

LIMIT_S = 20.0


class Network:
    """All lanes between some ranks; `started` contains lane and number of bytes of each send."""

    def __init__(self, limit_s=LIMIT_S):
        self.changed = threading.Condition()
        self.limit_s = limit_s
        self.waiting = defaultdict(lambda: (deque(), deque()))  # unmatched sends, receives
        self.started = []

    def lane(self, *key):
        return NetworkLane(self, key)

    def put(self, key, side, tensor):
        assert tensor.is_contiguous(), "there are gaps in its memory"
        work = NetworkWork(self, key, tensor)
        with self.changed:
            self.waiting[key][side].append(work)
            sends, receives = self.waiting[key]
            if side == 0:
                self.started.append((key, tensor.nbytes))
            while sends and receives:
                sent, received = sends.popleft(), receives.popleft()
                assert sent.tensor.nbytes == received.tensor.nbytes, f"{key}: Gloo would abort here"
                as_bytes(received.tensor).copy_(as_bytes(sent.tensor))
                sent.is_done = received.is_done = True
            self.changed.notify_all()
        return work

    def assert_quiet(self):
        """Assert that everything sent has been received."""
        left = {key: (len(out), len(into)) for key, (out, into) in self.waiting.items()}
        assert not any(map(any, left.values())), f"left over, sends and receives: {left}"


class NetworkLane:
    def __init__(self, network, key):
        self.network, self.key = network, key

    def send(self, tensor):
        return self.network.put(self.key, 0, tensor)

    def receive(self, tensor):
        return self.network.put(self.key, 1, tensor)


class NetworkWork:
    def __init__(self, network, key, tensor):
        self.network, self.key, self.tensor = network, key, tensor
        self.is_done = False

    def is_completed(self):
        return self.is_done

    def wait(self):
        with self.network.changed:
            if not self.network.changed.wait_for(lambda: self.is_done, self.network.limit_s):
                raise RuntimeError(f"{self.key}: timed out")


def as_bytes(tensor):
    return tensor.view(-1).view(torch.uint8)


class LateDevice(HostDevice):
    """A simulated accelerator that delays copies as long as possible.

    All tensors count as device tensors, except those with a dtype in `of_the_host`. Work on a
    stream other than the current one runs when the host or the current stream waits for it, so that
    code without this wait reads old values.
    """

    is_accelerator = True

    def __init__(self, *of_the_host):
        self.of_the_host = of_the_host
        self.streams = []
        self._current = threading.local()

    def holds(self, tensor):
        return tensor.dtype not in self.of_the_host

    def stream(self):
        self.streams.append(LateStream())
        return self.streams[-1]

    def current_stream(self):
        return getattr(self._current, "stream", None) or NOW

    @contextmanager
    def on(self, stream):
        self._current.stream = stream
        yield
        self._current.stream = None

    def copy_to_host(self, pinned, tensor):
        self.current_stream().put(lambda: pinned.copy_(tensor))

    def copy_to_device(self, own, host):
        self.current_stream().put(lambda: own.copy_(host))


class LateStream:
    def __init__(self):
        self.lock = threading.Lock()
        self.waiting = deque()
        self.num_put = self.num_done = 0

    def put(self, job):
        self.waiting.append(job)
        self.num_put += 1

    def do(self, count):
        with self.lock:
            while self.num_done < count:
                self.waiting.popleft()()
                self.num_done += 1

    def wait_stream(self, other):
        assert other is NOW

    def record_event(self):
        return LateEvent(self, self.num_put)


class LateEvent:
    def __init__(self, stream, count):
        self.stream, self.count = stream, count

    def query(self):
        return self.stream.num_done >= self.count

    def synchronize(self):
        self.stream.do(self.count)


class Now:
    """The current stream, which runs all work immediately."""

    def put(self, job):
        job()

    def wait_event(self, event):
        event.synchronize()


NOW = Now()


class NetworkWorld(ThreadWorld):
    """A thread world whose boundaries use the transport of processes over a `Network`.

    `device` is the device of boundary tensors. `has_backend` adds a channel of the device's own
    backend, which is one queue per pair of ranks.
    """

    def __init__(self, world, network, device=None, *, has_backend=False):
        super().__init__(world.hub, world.rank)
        self.network, self.has_backend = network, has_backend
        self.boundary_device = device or HostDevice()

    def transport(self, channels, device=None):
        lane = self.network.lane
        links = []
        for channel in channels:
            ends = channel.source_rank, channel.destination_rank
            if self.rank in ends:
                hosts = lane(*ends, channel.tag, "prompt"), lane(*ends, channel.tag, "late")
                direct = lane(*ends, "device") if self.has_backend else None
                peer = ends[1] if self.rank == ends[0] else ends[0]
                links.append(ChannelEnd(channel, peer, *hosts, direct))
        payload = Payload(self.boundary_device)
        return ProcessTransport(links, payload, Outbox(payload))
