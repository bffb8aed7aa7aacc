"""The face of a set of ranks, whether they are threads or processes."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final, Protocol

from gpipe_hpc.comm.collectives.group import Gathering, Group
from gpipe_hpc.comm.net.secret import Secret
from gpipe_hpc.comm.transport.base import PlacedChannel, Transport
from gpipe_hpc.comm.watchdog.pulse import Idle, Phase
from gpipe_hpc.comm.watchdog.report import Report
from gpipe_hpc.comm.watchdog.tracebacks import leave_out_own_frames, shows_all_frames, users_line
from gpipe_hpc.device.device import Device
from gpipe_hpc.errors import GpipeError, PeerError, is_users_mistake, text_of, words_of

log = logging.getLogger("gpipe_hpc.comm")

_TOLD: Final = "was_told_to_other_ranks"
"""The name, in an error, of whether the other ranks have been told of it."""


class World(Protocol):
    """All ranks of a run, seen from one of them."""

    rank: int
    size: int
    device: Device
    everybody: Gathering
    """All ranks, for what starts and ends a run: the main thread's, in one order everywhere.

    What steps do belongs to groups of their own, as it may be under way when something else begins.
    """
    activity: object
    """What this rank is doing (an action, or a text); shown when another rank waits in vain."""

    @property
    def doing(self) -> str:
        """Return what this rank is doing, and for whom it waits, in words; any thread may ask."""

    is_one_process: bool
    """Whether all ranks are threads of this process, which share what they are given."""

    secret: Secret
    """What ranks prove to each other over sockets of their own; see `joining.secret`."""

    def group(self, members: Sequence[Sequence[int]]) -> Group:
        """Form disjoint groups, the same call on every rank; return the one this rank is in.

        Its members alone form it, so those that share groups make their calls in one order.
        """

    def gathering(self, members: Sequence[Sequence[int]]) -> Gathering:
        """Form disjoint sets of ranks, maybe many, for sums and objects; otherwise as `group`."""

    def transport(
        self, channels: Sequence[PlacedChannel], device: Device | None = None
    ) -> Transport:
        """Open channels; the ranks at their ends call it, in one order if they share several.

        `device`: where the tensors lie that are worth a queue of its backend; None for this world's
        own. Others may travel as well.
        """

    @property
    def has_news(self) -> bool:
        """Say whether another rank has failed and this one has not been told; waits for nobody."""

    def fail(self, report: str, *, is_mistake: bool = False, is_stop: bool = False) -> None:
        """Tell every rank that this one failed, and unblock those that wait for it.

        `is_mistake`: as settings cannot work. `is_stop`: as a signal asked it to stop.
        """

    def explain(self, symptom: str) -> Report:
        """Return why a wait failed: the first failed rank's own report, or who fell silent."""


def together(world: World, where: str) -> AbstractContextManager[None]:
    """Let every rank stop if one fails within the block, all with the first failure's report.

    A lost connection becomes a PeerError that carries the report of the rank that failed;
    what fails here is told to the others and raised as it is, without our frames. With an
    accelerator news of a failure that came meanwhile becomes a PeerError, too: sums that were cut
    off may end there without an error, with anything in memory, by which nobody shall step or save.
    """
    return _Together(world, where)


def telling(world: World, where: str = "") -> AbstractContextManager[None]:
    """Let every rank stop if this one fails within the block, with its own words.

    For what a rank does by itself, with the others ahead of it: user's code, files, figures. They
    are told where it fails, not where it ends: on the way there it may close files and wait, while
    they wait for it and look for another cause. A lost connection becomes a PeerError, as in
    `together`, which tells of what all ranks do.
    """
    return _Telling(world, where)


class _Telling:
    # No generator: contextlib would give errors the frames back that are left out.

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
        """Tell the others of an error, once; raise what they told instead if it came of theirs."""
        world, ahead = self._world, self._ahead(error)
        if isinstance(error, ConnectionError | TimeoutError):
            heard = _heard(world, f"{ahead}{text_of(error)}")
            raise heard from (error if shows_all_frames() else None)
        if not isinstance(error, PeerError) and _TOLD not in vars(error):
            vars(error)[_TOLD] = True  # not by setattr: a user's class may allow none
            _tell(world, Report(_words(error, ahead), is_users_mistake(error)))
        leave_out_own_frames(error)

    def _ahead(self, error: BaseException) -> str:
        """Return what is said ahead of an error: in what it came, and the user's own line."""
        return "".join(f"{each}: " for each in (self._where, users_line(error)) if each)


class _Together(_Telling):
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
            elif self._world.device.is_accelerator and self._world.has_news:
                raise _heard(self._world, f"{where}: another rank has failed")
        finally:
            self._world.activity = outer if isinstance(outer, Phase) else Idle(where)

    def _ahead(self, error: BaseException) -> str:
        return f"{self._where}: "


def _words(error: BaseException, ahead: str) -> str:
    """Return what is said of an error; one of ours says itself where it happened."""
    if isinstance(error, GpipeError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return f"{ahead}interrupted"
    return f"{ahead}{words_of(error)}"


def _tell(world: World, report: Report) -> None:
    """Tell all ranks; if that fails too, what failed first is still what is raised."""
    words = report.words
    named = words if words.startswith("rank ") else f"rank {world.rank}: {words}"
    try:
        world.fail(named, is_mistake=report.is_mistake)
    except Exception:
        log.exception("rank %d: the other ranks could not be told of: %s", world.rank, words)


def _heard(world: World, symptom: str) -> PeerError:
    """Return what stops this rank: the failure of another, which ended its wait."""
    report = world.explain(symptom)
    return PeerError(report.words, is_mistake=report.is_mistake, is_stop=report.is_stop)
