"""What the engine asks of a transport, whatever carries the bytes."""

from typing import NamedTuple, Protocol

from gpipe_hpc.pytree import Nest
from gpipe_hpc.schedule import Channel


class PlacedChannel(NamedTuple):
    """A channel of a table with the world ranks at its ends."""

    channel: Channel
    source_rank: int
    destination_rank: int
    tag: int  # unique among the channels between these ranks in this direction

    def __str__(self) -> str:
        """Return a name for messages."""
        source, destination = self.channel.source, self.channel.destination
        return (
            f"stage {source} (rank {self.source_rank}) to {destination} ({self.destination_rank})"
        )


class Message(NamedTuple):
    """A nest that has arrived; `num_samples` is 0 for an empty micro-batch."""

    nest: Nest
    num_samples: int


class Transport(Protocol):
    """Move boundaries between ranks.

    Sends never block. `lane` keeps apart what different tables expect of the same channel
    (training and evaluation may use other shapes).
    """

    def send(
        self, channel: PlacedChannel, lane: str, microbatch: int, nest: Nest, num_samples: int
    ) -> None:
        """Start sending a nest; its tensors are released once they have left."""

    def post(self, channel: PlacedChannel, lane: str, microbatch: int) -> None:
        """Post the buffers for the next message of a channel; does not block."""

    def wait(self, channel: PlacedChannel, lane: str, microbatch: int) -> Message:
        """Return the posted message, waiting until it is here.

        Raises ConnectionError if the other end is gone, TimeoutError if it is silent.
        """

    def finish(self) -> None:
        """Wait until everything sent has left; nothing may be posted and not consumed."""
