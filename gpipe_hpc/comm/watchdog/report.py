"""What all ranks are told of the run's failure."""

import json
from typing import NamedTuple


class Report(NamedTuple):
    """The words of the rank that failed first, and why: settings that cannot work, or a signal.

    `is_stop`: it was asked to stop from outside, so the same command goes on.
    """

    words: str
    is_mistake: bool = False
    is_stop: bool = False

    @classmethod
    def read(cls, text: str) -> "Report":
        """Return what `written` has written."""
        words, *why = json.loads(text)
        return cls(str(words), *(each is True for each in why[:2]))

    def written(self) -> str:
        """Return it as a text, for a store."""
        return json.dumps(self)
