"""How much memory tensors take at once, whatever the C library's heap makes of it."""

from collections.abc import Callable
from typing import TypeVar

from torch.autograd.profiler import profile

Made = TypeVar("Made")


def weigh(run: Callable[[], Made]) -> tuple[Made, int]:
    """Call a function; return its result and the most bytes that its tensors took at once.

    Counted is what torch asks of its allocator on the host and gives back, beyond what was there
    before. Memory that others map, such as slots shared by ranks, is not in it.
    """
    with profile(profile_memory=True) as trace:
        made = run()
    assert trace.kineto_results is not None, "the profiler has ended, so it has results"
    changes = [event for event in trace.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    # Those of one moment stay in their order.
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return made, most
