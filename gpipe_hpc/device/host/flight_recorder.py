"""Torch's record of past collectives, which a run on CPUs does without.

Each collective leaves a few small strings there, of the newest 2,000. They are made while tensors
of a step live in the same heap, and stay when those are gone: the free room between them is cut
into pieces too small for the next step's tensors, so a rank grew by half a megabyte a step.
"""

import os
from collections.abc import MutableMapping
from typing import Final

# Torch reads the first of them that is there, once, when it makes its first process group.
_VARIABLES: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def leave_unrecorded(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch record no collectives, unless the user has said how many.

    For the whole process, ahead of its first process group: later it has no effect.
    """
    if not any(name in environment for name in _VARIABLES):
        environment[_VARIABLES[0]] = "0"
