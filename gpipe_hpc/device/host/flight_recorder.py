"""Switch off torch's flight recorder (its log of past collectives) for runs on CPUs.

For each of the newest 2,000 collectives it stores a few small strings. They are allocated between
the tensors of a step and outlive them, which fragments the heap: a rank grew by half a megabyte per
step.
"""

import os
from collections.abc import MutableMapping
from typing import Final

# torch reads the first of these that is set, when it creates the first process group.
_VARIABLES: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def disable_flight_recorder(environment: MutableMapping[str, str] = os.environ) -> None:
    """Disable torch's flight recorder, unless the user has set its buffer size.

    Applies to the whole process; call it before the first process group is created.
    """
    if not any(name in environment for name in _VARIABLES):
        environment[_VARIABLES[0]] = "0"
