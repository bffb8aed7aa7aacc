"""Interface of transports, which send activations and gradients between the ranks of stages."""

from typing import NamedTuple, Protocol

from gpipe_hpc.pytree import Nest
from gpipe_hpc.schedule import Channel


class PlacedChannel(NamedTuple):
    """A channel of a schedule, with the world ranks at both ends."""

    channel: Channel
    source_rank: int
    destination_rank: int
    tag: int  # unique among the channels between these ranks in this direction

    def __str__(self) -> str:
        """Return a name of the channel for messages."""
        source, destination = self.channel.source, self.channel.destination
        return (
            f"stage {source} (rank {self.source_rank}) to {destination} ({self.destination_rank})"
        )


class Message(NamedTuple):
    """A received nest of tensors; `num_samples` is 0 for an empty micro-batch."""

    nest: Nest
    num_samples: int


class Transport(Protocol):
    """Sends and receives nests of tensors at stage boundaries.

    Sends never block. `lane` separates schedules that use the same channel (training and evaluation
    may use different shapes).
    """

    def send(
        self, channel: PlacedChannel, lane: str, microbatch: int, nest: Nest, num_samples: int
    ) -> None:
        """Start sending a nest; its tensors are released once they are sent."""

    def post(self, channel: PlacedChannel, lane: str, microbatch: int) -> None:
        """Post buffers for the next message of a channel; does not block."""

    def wait(self, channel: PlacedChannel, lane: str, microbatch: int) -> Message:
        """Block until the posted message has arrived and return it.

        Raises ConnectionError if the peer has ended, TimeoutError if it does not respond.
        """

    def finish(self) -> None:
        """Block until all messages are sent; no posted receive may be pending."""
