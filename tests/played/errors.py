"""What the played device finds wrong, each with the operator and the line that called it."""


class PlayedError(AssertionError):
    """A device would not, or not always, do what was meant."""


class RaceError(PlayedError):
    """Memory is used by two streams, or a stream and the host, and no wait orders them."""


class ReuseError(PlayedError):
    """Memory is handed out again while another stream may still use it."""


class PinnedError(PlayedError):
    """Pinned memory is used by the host before a copy from or to it is done."""


class PlaceError(PlayedError):
    """A tensor of the host stands where one of the device must, or the other way round."""


class MarkError(PlayedError):
    """The time of a mark is read before it is known."""


class LateError(PlayedError):
    """What the device was asked to do before, and could not, is told where nobody expects it."""


class ThreadError(PlayedError):
    """A thread uses a device that it has not made its own: it would be on the first of its kind."""
