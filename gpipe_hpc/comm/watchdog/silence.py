"""Classification of a neighbour by the duration of its silence."""

from enum import Enum
from typing import Final, NamedTuple

from gpipe_hpc.comm.watchdog.link import NeighbourLink

BEAT_S: Final = 1.0
"""Interval of heartbeats in seconds."""

SUSPECT_SHARE: Final = 0.4
"""Share of the time to loss after which a warning about a silent rank is sent."""

_SUSPECT_BEATS: Final = 2.5  # more than two, because one may be late
_RECONNECT_S: Final = 3.0


class ChangeKind(Enum):
    """Change of a neighbour's state."""

    HELPER = "helper"  # its watcher process has ended and was not replaced
    SILENT = "silent"  # lost
    SUSPECT = "suspect"
    AGAIN = "again"


class NeighbourChange(NamedTuple):
    """Change of a neighbour's state and its description."""

    sign: ChangeKind
    text: str


def classify_silence(
    link: NeighbourLink, rank: int, silence_s: float, now_s: float
) -> NeighbourChange | None:
    """Return the change of state of a neighbour of `rank`; None if there is none."""
    if link.has_left:
        return None
    if link.ended_s is not None:
        limit_s = max(_RECONNECT_S, SUSPECT_SHARE * silence_s)
        if now_s > link.ended_s + limit_s:
            text = f"{_helper_of(link)} has ended and was not replaced within {limit_s:.0f} s"
            return NeighbourChange(ChangeKind.HELPER, text)
        return None
    silent_s = link.silent_s(now_s)
    if silent_s > silence_s:
        return NeighbourChange(ChangeKind.SILENT, describe_silence(link, rank, now_s))
    if silent_s > max(SUSPECT_SHARE * silence_s, _SUSPECT_BEATS * BEAT_S) and not link.is_suspect:
        link.is_suspect = True
        return NeighbourChange(
            ChangeKind.SUSPECT, f"has given no sign of life to rank {rank} for {silent_s:.0f} s"
        )
    if link.is_suspect and silent_s < 2 * BEAT_S:
        link.is_suspect = False
        return NeighbourChange(ChangeKind.AGAIN, "gives signs of life again")
    return None


def describe_silence(link: NeighbourLink, rank: int, now_s: float) -> str:
    """Return a description of a neighbour that `rank` considers lost because it is silent."""
    silent_s = link.silent_s(now_s)
    return f"gave no sign of life to rank {rank} for {silent_s:.0f} s ({_helper_of(link)})"


def _helper_of(link: NeighbourLink) -> str:
    return f"its helper process {link.helper}".rstrip()


def is_overdue(link: NeighbourLink, now_s: float) -> bool:
    """Return whether heartbeats of a neighbour are missing."""
    return link.silent_s(now_s) > _SUSPECT_BEATS * BEAT_S
