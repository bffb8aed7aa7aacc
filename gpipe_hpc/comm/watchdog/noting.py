"""How a wait says for which ranks it waits, so that a message can name them if they never come."""

from collections.abc import Callable, Sequence

Note = Callable[[Sequence[int] | None], None]
"""Takes the ranks that are waited for; None once they have come."""


def unheard(ranks: Sequence[int] | None) -> None:
    """Tell nobody."""
