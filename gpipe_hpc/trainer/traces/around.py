"""What a rank does in a step besides the actions of its table."""

from typing import NamedTuple


class Around(NamedTuple):
    """What a rank did around the pipeline of a step, and when, in seconds of its host's clock."""

    name: str
    start_s: float
    end_s: float
