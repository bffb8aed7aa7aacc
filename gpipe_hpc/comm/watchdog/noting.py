"""Callback type by which a wait reports the ranks it waits for, for error messages."""

from collections.abc import Callable, Sequence

Note = Callable[[Sequence[int] | None], None]
"""Takes the ranks that are waited for; None once the wait has ended."""


def unheard(ranks: Sequence[int] | None) -> None:
    """A `Note` callback that ignores the ranks that are waited for."""
