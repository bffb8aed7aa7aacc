"""Activities of a rank in a step outside its pipeline actions."""

from typing import NamedTuple


class Around(NamedTuple):
    """An activity of a rank outside the pipeline, such as clipping; host times in seconds."""

    name: str
    start_s: float
    end_s: float
