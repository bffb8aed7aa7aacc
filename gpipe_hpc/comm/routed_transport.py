"""Several transports as one: each channel has its own."""

from collections.abc import Mapping

from gpipe_hpc.comm.nests import Nest
from gpipe_hpc.comm.transport import Message, PlacedChannel, Transport


class RoutedTransport:
    """Hand each call to the transport of its channel."""

    def __init__(self, routes: Mapping[PlacedChannel, Transport]) -> None:
        self._routes = dict(routes)
        self._transports = list({id(each): each for each in routes.values()}.values())

    def send(
        self, channel: PlacedChannel, lane: str, microbatch: int, nest: Nest, num_samples: int
    ) -> None:
        """Send over the channel's transport."""
        self._routes[channel].send(channel, lane, microbatch, nest, num_samples)

    def post(self, channel: PlacedChannel, lane: str, microbatch: int) -> None:
        """Post at the channel's transport."""
        self._routes[channel].post(channel, lane, microbatch)

    def wait(self, channel: PlacedChannel, lane: str, microbatch: int) -> Message:
        """Wait at the channel's transport."""
        return self._routes[channel].wait(channel, lane, microbatch)

    def finish(self) -> None:
        """Finish all of them."""
        for transport in self._transports:
            transport.finish()
