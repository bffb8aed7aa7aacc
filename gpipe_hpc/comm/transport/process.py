"""Channels between processes over torch.distributed.

The size of a posted receive must be known in advance: with Gloo a larger message aborts the
process, a smaller one leaves old data at the end. So each message begins with an announcement of
fixed size (`Announcement`). Receives for the announcement and for the tensors of the expected
structure are posted ahead, on the `prompt` lane. If a message has another structure, the sender
still fills the posted buffers. Header and tensors then follow on the `late` lane, on which the
receiver posts them after reading the announcement.

Accelerator tensors that were posted ahead use a single lane of the device's backend per pair and
direction. All channels share it, because receives are posted in the order of the sends.
Announcements, headers, host tensors and late messages use host lanes: a late receive on the device
lane would have to wait for those posted before it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gpipe_hpc.comm.transport.base import Message, PlacedChannel
from gpipe_hpc.comm.transport.lanes import Lane
from gpipe_hpc.comm.transport.outbox import Outbox
from gpipe_hpc.comm.transport.payload import OutgoingTensor, Payload, PostedReceive, TensorLanes
from gpipe_hpc.comm.transport.wire import (
    EMPTY,
    WORD_LENGTH,
    Announcement,
    ExpectedStructure,
    StructureCache,
    assemble,
    disassemble,
)
from gpipe_hpc.comm.watchdog.failure import lost
from gpipe_hpc.pytree import Nest


class ChannelEnd:
    """One end of a channel: its lanes, and the structures of messages known to both ends.

    `prompt` and `late` are host lanes; `direct` is a lane of the device's backend, if there is one.
    """

    def __init__(
        self,
        channel: PlacedChannel,
        peer: int,
        prompt: Lane,
        late: Lane,
        direct: Lane | None = None,
    ) -> None:
        self.channel = channel
        self.peer = peer
        self.late = late
        self.prompt = prompt
        self.posted_ways, self.late_ways = TensorLanes(prompt, direct), TensorLanes(late, None)
        self.serial = 0
        self.posted: list[_PendingReceive] = []
        self.catalogue = StructureCache()
        self._places: dict[tuple[str, int], ExpectedStructure] = {}

    def place(self, lane: str, microbatch: int) -> ExpectedStructure:
        """Return the structure to expect for a micro-batch of the schedule that uses `lane`."""
        key = (lane, microbatch)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = ExpectedStructure()
        return place


class _PendingReceive(NamedTuple):
    """A posted receive."""

    lane: str
    microbatch: int
    expected: int | None
    word: PostedReceive
    tensors: list[PostedReceive]


class ProcessTransport:
    """Transport between processes over torch; `payload` moves tensors to and from the device."""

    def __init__(self, links: Sequence[ChannelEnd], payload: Payload, outbox: Outbox) -> None:
        self._links = {link.channel: link for link in links}
        self._payload = payload
        self._outbox = outbox

    def send(
        self, channel: PlacedChannel, lane: str, microbatch: int, nest: Nest, num_samples: int
    ) -> None:
        """Start sending the announcement and the tensors.

        Tensors use the buffers that the receiver has posted if they have the expected structure,
        else the `late` lane.
        """
        link, payload = self._links[channel], self._payload
        structure, tensors = disassemble(nest, payload.device) if num_samples else (EMPTY, [])
        number, header = link.catalogue.identify(structure)
        place = link.place(lane, microbatch)
        word = Announcement(link.serial, microbatch, number, len(header), num_samples)
        link.serial += 1
        parts = [OutgoingTensor(link.prompt, torch.tensor(word, dtype=torch.int64))]
        as_expected = place.expected == number
        if place.expected is not None and not as_expected:
            parts += payload.fill(place.metas, link.posted_ways)
        if header:
            parts.append(
                OutgoingTensor(link.late, torch.frombuffer(bytearray(header), dtype=torch.uint8))
            )
        ways = link.posted_ways if as_expected else link.late_ways
        parts += payload.send(tensors, structure.metas, ways)
        place.saw(number, structure)
        try:
            self._outbox.put(link.peer, parts)
        except RuntimeError as error:
            raise lost(error, f"rank {channel.destination_rank}") from error

    def post(self, channel: PlacedChannel, lane: str, microbatch: int) -> None:
        """Post buffers for the announcement and for the tensors of the expected structure."""
        link = self._links[channel]
        place = link.place(lane, microbatch)
        try:
            word = self._payload.receive_word(link.prompt, WORD_LENGTH)
            tensors = self._payload.receive(place.metas, link.posted_ways)
        except RuntimeError as error:
            raise lost(error, f"rank {channel.source_rank}") from error
        link.posted.append(_PendingReceive(lane, microbatch, place.expected, word, tensors))

    def wait(self, channel: PlacedChannel, lane: str, microbatch: int) -> Message:
        """Return the message of the oldest posted receive of the channel."""
        link = self._links[channel]
        posted = link.posted.pop(0)
        assert (posted.lane, posted.microbatch) == (lane, microbatch), (
            f"{channel}: waiting for micro-batch {microbatch} of {lane}, "
            f"but the oldest receive is posted for {posted.microbatch} of {posted.lane}"
        )
        try:
            return self._take(link, posted)
        except RuntimeError as error:
            raise lost(error, f"rank {channel.source_rank}") from error

    def _take(self, link: ChannelEnd, posted: _PendingReceive) -> Message:
        word = Announcement(*posted.word.wait().tolist())
        if word.serial != link.serial or word.microbatch != posted.microbatch:
            raise ConnectionError(
                f"{link.channel}: expected message {link.serial} with micro-batch "
                f"{posted.microbatch}, got message {word.serial} with micro-batch "
                f"{word.microbatch}; the ranks do not run the same table"
            )
        link.serial += 1
        if word.header_bytes:
            header = self._payload.receive_word(link.late, word.header_bytes, torch.uint8).wait()
            link.catalogue.learn(header.numpy().tobytes())
        structure, receives = link.catalogue[word.structure], posted.tensors
        if word.structure != posted.expected:
            for part in posted.tensors:
                part.drop()
            receives = self._payload.receive(structure.metas, link.late_ways)
        tensors = [part.wait() for part in receives]
        link.place(posted.lane, posted.microbatch).saw(word.structure, structure)
        if word.num_samples == 0:
            return Message(None, 0)
        return Message(assemble(structure, tensors), word.num_samples)

    def finish(self) -> None:
        """Block until all messages are sent; assert that no posted receive is pending."""
        for link in self._links.values():
            assert not link.posted, f"{link.channel}: {len(link.posted)} receives left over"
        try:
            self._outbox.drain()
        except RuntimeError as error:
            raise lost(error, "a rank to which messages were sent") from error
