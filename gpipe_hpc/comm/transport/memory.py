"""Channels as in-memory queues between threads of one process; tensors are not copied.

On an accelerator the receiver's stream waits for the sender's stream, and the host does not block.
"""

from collections import deque
from collections.abc import Sequence

from gpipe_hpc.comm.transport.base import Message, PlacedChannel
from gpipe_hpc.comm.transport.device_handoff import accept_handoff, hand_off
from gpipe_hpc.comm.transport.thread_hub import ThreadHub
from gpipe_hpc.comm.transport.wire import StructureCache, assemble, disassemble
from gpipe_hpc.device.device import Device
from gpipe_hpc.pytree import Nest


class MemoryTransport:
    """Transport that passes nests by reference.

    Sender and receiver share storage, unlike with processes. This makes no difference, because a
    stage never writes into a received boundary.
    """

    def __init__(self, hub: ThreadHub, channels: Sequence[PlacedChannel], device: Device) -> None:
        self._hub, self._device = hub, device
        self._num_posted = 0
        self._catalogues = {channel: StructureCache() for channel in channels}
        with hub.changed:
            for channel in channels:
                hub.queues.setdefault(channel, deque())

    def send(
        self, channel: PlacedChannel, lane: str, microbatch: int, nest: Nest, num_samples: int
    ) -> None:
        """Append a message to the channel's queue."""
        structure, tensors = disassemble(nest)
        # Refuse what processes could not send, so that both transports behave alike.
        self._catalogues[channel].identify(structure)
        with self._hub.changed:
            # Rebuilt here, so that both ends see the same new leaves as over a network.
            self._hub.refuse_failed(f"rank {channel.destination_rank}")
            message = Message(assemble(structure, tensors), num_samples)
            left = hand_off(self._device, tensors)
            self._hub.queues[channel].append((microbatch, message, left))
            self._hub.changed.notify_all()

    def post(self, channel: PlacedChannel, lane: str, microbatch: int) -> None:
        """Count the posted receive; there is no buffer to prepare."""
        self._num_posted += 1

    def wait(self, channel: PlacedChannel, lane: str, microbatch: int) -> Message:
        """Remove and return the first message of the channel's queue."""
        queue = self._hub.queues[channel]
        what = f"rank {channel.source_rank}"
        with self._hub.changed:
            if self._hub.report is not None or not queue:
                self._hub.refuse_failed(what)
                self._hub.wait_for(lambda: True if queue else None, what)
            came, message, left = queue.popleft()
        assert came == microbatch, f"{channel}: expected micro-batch {microbatch}, got {came}"
        self._num_posted -= 1
        if self._device.is_accelerator:  # host tensors need no wait
            accept_handoff(self._device, left)
        return message

    def finish(self) -> None:
        """Assert that every posted receive was consumed."""
        assert self._num_posted == 0, f"{self._num_posted} posted receives were never consumed"
