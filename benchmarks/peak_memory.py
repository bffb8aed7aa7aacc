"""Peak memory of tensors, independent of fragmentation in the C library's heap."""

from collections.abc import Callable
from typing import TypeVar

from torch.autograd.profiler import profile

Made = TypeVar("Made")


def weigh(run: Callable[[], Made]) -> tuple[Made, int]:
    """Call a function; return its result and the peak bytes of its tensors.

    Counts torch's host allocations and frees relative to the start. Memory mapped by other means,
    such as shared slots, is not included.
    """
    with profile(profile_memory=True) as trace:
        made = run()
    assert trace.kineto_results is not None, "the profiler has ended, so it has results"
    changes = [event for event in trace.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    # The sort is stable for events of equal time.
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return made, most
