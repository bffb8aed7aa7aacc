"""What all ranks are told of the run's failure."""

import json
from typing import NamedTuple


class Report(NamedTuple):
    """The words of the rank that failed first, and whether settings that cannot work are why."""

    words: str
    is_mistake: bool = False

    @classmethod
    def read(cls, text: str) -> "Report":
        """Return what `written` has written."""
        words, is_mistake = json.loads(text)
        return cls(str(words), bool(is_mistake))

    def written(self) -> str:
        """Return it as a text, for a store."""
        return json.dumps(self)
