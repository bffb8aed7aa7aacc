"""A transport that combines several transports, one for each channel."""

from collections.abc import Mapping

from gpipe_hpc.comm.transport.base import Message, PlacedChannel, Transport
from gpipe_hpc.comm.watchdog.activity import ActivityTracker
from gpipe_hpc.pytree import Nest


class RoutedTransport:
    """Forwards each call to the channel's transport; records in `pulse` the rank waited for."""

    def __init__(self, routes: Mapping[PlacedChannel, Transport], pulse: ActivityTracker) -> None:
        self._pulse = pulse
        self._routes = dict(routes)
        self._receivers = sorted({channel.destination_rank for channel in routes})
        self._transports = list({id(each): each for each in routes.values()}.values())

    def send(
        self, channel: PlacedChannel, lane: str, microbatch: int, nest: Nest, num_samples: int
    ) -> None:
        """Send a nest over the channel's transport."""
        self._routes[channel].send(channel, lane, microbatch, nest, num_samples)

    def post(self, channel: PlacedChannel, lane: str, microbatch: int) -> None:
        """Post the next receive on the channel's transport."""
        self._routes[channel].post(channel, lane, microbatch)

    def wait(self, channel: PlacedChannel, lane: str, microbatch: int) -> Message:
        """Block until the next message of the channel has arrived and return it."""
        self._pulse.waits_for = (channel.source_rank,)
        message = self._routes[channel].wait(channel, lane, microbatch)
        self._pulse.waits_for = None
        return message

    def finish(self) -> None:
        """Block until all transports have sent their messages."""
        self._pulse.waits_for = self._receivers
        for transport in self._transports:
            transport.finish()
        self._pulse.waits_for = None
