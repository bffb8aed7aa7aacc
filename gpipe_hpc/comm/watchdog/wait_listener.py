"""Type of a callback that receives the ranks for which a wait is waiting, for error messages."""

from collections.abc import Callable, Sequence

WaitListener = Callable[[Sequence[int] | None], None]
"""Takes the ranks that are waited for; None once the wait has ended."""


def ignore_wait(ranks: Sequence[int] | None) -> None:
    """Do nothing: a `WaitListener` callback for waits that need not be reported."""
