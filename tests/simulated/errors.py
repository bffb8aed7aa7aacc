"""Errors that the simulated device detects, with the operator and the line that called it."""


class SimulationError(AssertionError):
    """A real device would not, or not always, compute the intended result."""


class RaceError(SimulationError):
    """Two streams, or a stream and the host, use memory without a wait that orders them."""


class ReuseError(SimulationError):
    """Memory is reused while another stream may still use it."""


class PinnedError(SimulationError):
    """The host uses pinned memory before a copy from or to it is complete."""


class PlaceError(SimulationError):
    """A host tensor is used where a device tensor is needed, or vice versa."""


class EventError(SimulationError):
    """The time of an event is read before it is known."""


class LateError(SimulationError):
    """A failure of earlier device work is reported at an unexpected call."""


class ThreadError(SimulationError):
    """A thread uses a device without making it current, so it would use the first device."""
