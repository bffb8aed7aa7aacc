"""What lies in the buffer of a bucket."""

from typing import NamedTuple

import torch


class Item(NamedTuple):
    """A parameter in a bucket: its global name, its shape and where it lies in the buffer.

    `is_used`: whether a micro-batch of this replica has used it in this step.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    is_used: bool = True
