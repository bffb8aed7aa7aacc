"""Record of the messages that a watcher has received, so that each is forwarded only once."""

import os
from typing import Final

from gpipe_hpc.comm.watchdog.json_connection import Message

_MAX_HEARD: Final = 4000
_LASTING: Final = frozenset({"failure", "lost"})


class News:
    """The messages received so far; `failed_s` is the time when the first failure was received."""

    def __init__(self) -> None:
        # Time of receipt by name and by id.
        self._heard: dict[str, float] = {}
        self._num_own = 0
        # A watcher that replaces another must not reuse its ids.
        self._mark = os.urandom(4).hex()
        self.lasting: list[Message] = []  # to send to neighbours that connect later
        self.failed_s: float | None = None

    def number(self, news: Message, rank: int) -> Message:
        """Return the message with a unique id; ids created here start with `rank`."""
        if "id" in news:
            return news
        self._num_own += 1
        return news | {"id": f"{rank}.{self._mark}.{self._num_own}"}

    def is_new(self, news: Message, again_s: float, now_s: float) -> bool:
        """Return whether to forward a message, and record it.

        A message is forwarded only once, which its id decides. A message with another id and the
        same name is forwarded if the last one was at least `again_s` seconds ago.
        """
        name, number = str(news.get("name"))[:64], str(news["id"])[:64]
        last_s = self._heard.get(name, float("-inf"))
        if number in self._heard or now_s < last_s + again_s:
            return False
        self._heard[name] = self._heard[number] = now_s
        if news["kind"] in _LASTING:
            self.lasting.append(news)
            self.failed_s = now_s if self.failed_s is None else self.failed_s
        return True

    def forget_old(self) -> None:
        """Delete the older half of the records if there are many."""
        if len(self._heard) > _MAX_HEARD:
            kept = sorted(self._heard.items(), key=lambda entry: entry[1])[_MAX_HEARD // 2 :]
            self._heard = dict(kept)
