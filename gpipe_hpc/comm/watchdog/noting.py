"""Type of a callback that receives the ranks for which a wait is waiting, for error messages."""

from collections.abc import Callable, Sequence

Note = Callable[[Sequence[int] | None], None]
"""Takes the ranks that are waited for; None once the wait has ended."""


def unheard(ranks: Sequence[int] | None) -> None:
    """Do nothing: a `Note` callback for waits that need not be reported."""
