"""Handles of asynchronous torch communication that name the ranks involved if it fails."""

from collections.abc import Callable, Sequence
from typing import Any

from gpipe_hpc.comm.collectives.group import CompletionCallbacks, rank_names
from gpipe_hpc.comm.watchdog.failure import lost
from gpipe_hpc.comm.watchdog.wait_listener import WaitListener

Started = Sequence[tuple[Sequence[int], Any]]
"""torch works, each with the ranks that it waits for."""


class TorchWorks:
    """A set of torch works in progress; errors name the ranks of the failed work, or `what`.

    `tells` states that there is a single work whose future signals its completion. The future of
    device tensors does not: it completes as soon as the work is enqueued on its stream.
    """

    def __init__(
        self, started: Started, note: WaitListener, what: str | None = None, *, tells: bool = False
    ) -> None:
        self._started, self._note, self._what = started, note, what
        self._tells, self._calls = tells, CompletionCallbacks()

    def when_done(self, call: Callable[[], None]) -> None:
        """Run `call` on completion if it is signalled, else once `wait` was called."""
        self._calls.add(call)
        if self._tells:
            self._started[0][1].get_future().add_done_callback(lambda _: self._calls.make())

    def wait(self) -> None:
        """Block until all works are complete; ConnectionError or TimeoutError if one fails."""
        for ranks, work in self._started:
            self._note(ranks)
            try:
                work.wait()
            except RuntimeError as error:
                raise lost(error, self._what or rank_names(ranks)) from error
        self._note(None)
        self._calls.make()
