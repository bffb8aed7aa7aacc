"""The failure report that all ranks receive."""

import json
from typing import NamedTuple


class FailureReport(NamedTuple):
    """The message of the rank that failed first, and the kind of failure.

    Args:
        words: the error message.
        is_mistake: whether the user's settings cannot work.
        is_stop: whether a signal stopped the run, which the same command can resume.
    """

    words: str
    is_mistake: bool = False
    is_stop: bool = False

    @classmethod
    def read(cls, text: str) -> "FailureReport":
        """Parse the text of `written`."""
        words, *why = json.loads(text)
        return cls(str(words), *(each is True for each in why[:2]))

    def written(self) -> str:
        """Serialize the report for the store."""
        return json.dumps(self)
