"""Which news a watcher has heard, so that each is passed on once."""

import os
from typing import Final

from gpipe_hpc.comm.watchdog.lines import Message

_MAX_HEARD: Final = 4000
_LASTING: Final = frozenset({"failure", "lost"})


class News:
    """What has come by. `failed_s`: when the run was first heard to have failed."""

    def __init__(self) -> None:
        # Names of news and the numbers of single messages, and when they were heard.
        self._heard: dict[str, float] = {}
        self._num_own = 0
        self._mark = os.urandom(
            4
        ).hex()  # a helper that replaces another must not reuse its numbers
        self.lasting: list[Message] = []  # for neighbours that come later
        self.failed_s: float | None = None

    def number(self, news: Message, rank: int) -> Message:
        """Return news with a number that no others have; `rank` begins those without one."""
        if "id" in news:
            return news
        self._num_own += 1
        return news | {"id": f"{rank}.{self._mark}.{self._num_own}"}

    def is_new(self, news: Message, again_s: float, now_s: float) -> bool:
        """Say whether to pass news on, and remember them.

        The same number never is new twice; news of the same name may be after `again_s` seconds.
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
        """Forget the older half once there are many."""
        if len(self._heard) > _MAX_HEARD:
            kept = sorted(self._heard.items(), key=lambda entry: entry[1])[_MAX_HEARD // 2 :]
            self._heard = dict(kept)
