"""What is under way over torch with other ranks."""

from collections.abc import Callable, Sequence
from typing import Any

from gpipe_hpc.comm.collectives.group import Calls, rank_names
from gpipe_hpc.comm.watchdog.failure import lost
from gpipe_hpc.comm.watchdog.noting import Note

Started = Sequence[tuple[Sequence[int], Any]]
"""Works of torch, each with the ranks that it waits for."""


class Works:
    """What is under way with other ranks; a failure names those of what has failed, or `what`.

    `tells`: it is one work, whose future says when it is done. On a device that would be as soon as
    the work stands on its stream.
    """

    def __init__(
        self, started: Started, note: Note, what: str | None = None, *, tells: bool = False
    ) -> None:
        self._started, self._note, self._what = started, note, what
        self._tells, self._calls = tells, Calls()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call this when all is done, if that is told; else once it was waited for."""
        self._calls.add(call)
        if self._tells:
            self._started[0][1].get_future().add_done_callback(lambda _: self._calls.make())

    def wait(self) -> None:
        """Return when all is done; raise ConnectionError or TimeoutError where it ends in vain."""
        for ranks, work in self._started:
            self._note(ranks)
            try:
                work.wait()
            except RuntimeError as error:
                raise lost(error, self._what or rank_names(ranks)) from error
        self._note(None)
        self._calls.make()
