"""Interface of a world: a set of ranks that are threads or processes."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final, Protocol

from gpipe_hpc.comm.collectives.group import ControlGroup, Group
from gpipe_hpc.comm.net.secret import Secret
from gpipe_hpc.comm.transport.base import PlacedChannel, Transport
from gpipe_hpc.comm.watchdog.activity import BetweenPhases, Phase
from gpipe_hpc.comm.watchdog.report import FailureReport
from gpipe_hpc.comm.watchdog.tracebacks import shows_all_frames, strip_own_frames, users_line
from gpipe_hpc.device.device import Device
from gpipe_hpc.errors import GpipeError, PeerError, is_users_mistake, text_of, words_of

log = logging.getLogger("gpipe_hpc.comm")

_TOLD: Final = "was_told_to_other_ranks"
"""Attribute of an error that has been reported to the other ranks."""


class World(Protocol):
    """All ranks of a run, as seen from one of them."""

    rank: int
    size: int
    device: Device
    world_group: ControlGroup
    """Group of all ranks, for collectives at the start and end of a run.

    Only the main thread uses it, in the same order on all ranks. Steps use groups of their own,
    because their collectives may still be in progress.
    """
    activity: object
    """Current activity of this rank (an action or a text); reported if another rank times out."""

    @property
    def doing(self) -> str:
        """Return the current activity and the ranks waited for as text; thread-safe."""

    is_one_process: bool
    """Whether all ranks are threads of this process and share objects."""

    secret: Secret
    """Secret by which ranks authenticate connections; see `gpipe_hpc.comm.net.secret`."""

    def group(self, members: Sequence[Sequence[int]]) -> Group:
        """Form disjoint groups and return the group of this rank; a collective call.

        Only the members of a group communicate to form it, so ranks that share several groups must
        form them in the same order.
        """

    def control_group(self, members: Sequence[Sequence[int]]) -> ControlGroup:
        """Form disjoint groups of possibly many ranks for small sums and objects; see `group`."""

    def transport(
        self, channels: Sequence[PlacedChannel], device: Device | None = None
    ) -> Transport:
        """Open point-to-point channels; both ends call this, in the same order for shared channels.

        `device` is the device whose tensors are sent by its own backend if possible; by default
        that of this world. Other tensors can be sent as well.
        """

    @property
    def has_peer_failure(self) -> bool:
        """Return whether another rank has failed and this rank has not handled it yet.

        Does not block.
        """

    def fail(self, report: str, *, is_mistake: bool = False, is_stop: bool = False) -> None:
        """Report to every rank that this one failed, and unblock the ranks that wait for this one.

        `is_mistake` marks an error in the user's settings, `is_stop` a requested stop by a signal.
        """

    def explain(self, symptom: str) -> FailureReport:
        """Return why a wait failed: the report of the first rank that failed or became silent."""


def collective_errors(world: World, where: str) -> AbstractContextManager[None]:
    """Return a context in which a failure of one rank stops all ranks with that failure's report.

    For work in which all ranks communicate. A lost connection becomes a PeerError with the report
    of the failed rank. An error raised here is reported to the other ranks and re-raised without
    this package's frames. With an accelerator, a failure that another rank reports meanwhile raises
    PeerError, too: aborted collectives may end without an error and leave undefined values, which
    must be neither used for a step nor saved.
    """
    return _CollectiveErrors(world, where)


def broadcast_errors(world: World, where: str = "") -> AbstractContextManager[None]:
    """Return a context in which a failure of this rank stops all ranks with its own error message.

    For work that a rank does alone while others wait for it: user code, files, figures. The other
    ranks are informed at once, before the error propagates, because cleaning up may take long and
    they would time out with a less helpful error. A lost connection becomes a PeerError, as in
    `collective_errors`.
    """
    return _BroadcastErrors(world, where)


class _BroadcastErrors:
    # Not a generator: contextlib would restore the stack frames that are removed.

    def __init__(self, world: World, where: str) -> None:
        self._world, self._where = world, where

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._share(error)

    def _share(self, error: BaseException) -> None:
        """Report an error to the other ranks once; raise PeerError if another rank caused it."""
        world, ahead = self._world, self._ahead(error)
        if isinstance(error, ConnectionError | TimeoutError):
            heard = _peer_error(world, f"{ahead}{text_of(error)}")
            raise heard from (error if shows_all_frames() else None)
        if not isinstance(error, PeerError) and _TOLD not in vars(error):
            vars(error)[_TOLD] = True  # not by setattr, which a user's class may forbid
            _report_failure(
                world, FailureReport(_error_text(error, ahead), is_users_mistake(error))
            )
        strip_own_frames(error)

    def _ahead(self, error: BaseException) -> str:
        """Return the prefix of an error message: the phase and the line of the user's code."""
        return "".join(f"{each}: " for each in (self._where, users_line(error)) if each)


class _CollectiveErrors(_BroadcastErrors):
    def __enter__(self) -> None:
        self._outer = self._world.activity
        self._world.activity = Phase(self._where)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        outer, where = self._outer, self._where
        try:
            if error is not None:
                self._share(error)
            elif self._world.device.is_accelerator and self._world.has_peer_failure:
                raise _peer_error(self._world, f"{where}: another rank has failed")
        finally:
            self._world.activity = outer if isinstance(outer, Phase) else BetweenPhases(where)

    def _ahead(self, error: BaseException) -> str:
        return f"{self._where}: "


def _error_text(error: BaseException, ahead: str) -> str:
    """Return the text of an error; errors of this package already contain their location."""
    if isinstance(error, GpipeError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return f"{ahead}interrupted"
    return f"{ahead}{words_of(error)}"


def _report_failure(world: World, report: FailureReport) -> None:
    """Report a failure to all ranks; if that fails, only log it, to keep the original error."""
    words = report.words
    named = words if words.startswith("rank ") else f"rank {world.rank}: {words}"
    try:
        world.fail(named, is_mistake=report.is_mistake)
    except Exception:
        log.exception("rank %d: could not report to the other ranks: %s", world.rank, words)


def _peer_error(world: World, symptom: str) -> PeerError:
    """Return the PeerError for another rank's failure, which ended this rank's wait."""
    report = world.explain(symptom)
    return PeerError(report.words, is_mistake=report.is_mistake, is_stop=report.is_stop)
