"""What the silence of a neighbour means, by how long it lasts."""

from enum import Enum
from typing import Final, NamedTuple

from gpipe_hpc.comm.watchdog.link import Link

BEAT_S: Final = 1.0
"""Seconds from one sign of life to the next."""

SUSPECT_SHARE: Final = 0.4
"""Of the time after which a rank counts as lost: from then on it is said to be silent."""

_SUSPECT_BEATS: Final = 2.5  # more than two: one may come late
_RECONNECT_S: Final = 3.0


class Sign(Enum):
    """What is new about a neighbour."""

    HELPER = "helper"  # its helper has ended, and no other has come
    SILENT = "silent"  # for good
    SUSPECT = "suspect"
    AGAIN = "again"


class Finding(NamedTuple):
    """What is new about a neighbour, and the words for it."""

    sign: Sign
    text: str


def judge(link: Link, rank: int, silence_s: float, now_s: float) -> Finding | None:
    """Return what is new about a neighbour of `rank`; None if nothing is."""
    if link.has_left:
        return None
    if link.ended_s is not None:
        limit_s = max(_RECONNECT_S, SUSPECT_SHARE * silence_s)
        if now_s > link.ended_s + limit_s:
            text = (
                f"{_helper_of(link)} has ended, and no other took its place within {limit_s:.0f} s"
            )
            return Finding(Sign.HELPER, text)
        return None
    silent_s = link.silent_s(now_s)
    if silent_s > silence_s:
        return Finding(Sign.SILENT, silence_told(link, rank, now_s))
    if silent_s > max(SUSPECT_SHARE * silence_s, _SUSPECT_BEATS * BEAT_S) and not link.is_suspect:
        link.is_suspect = True
        return Finding(Sign.SUSPECT, f"gives no sign of life to rank {rank} for {silent_s:.0f} s")
    if link.is_suspect and silent_s < 2 * BEAT_S:
        link.is_suspect = False
        return Finding(Sign.AGAIN, "gives signs of life again")
    return None


def silence_told(link: Link, rank: int, now_s: float) -> str:
    """Return what is said of a neighbour of `rank` that is lost by its silence."""
    silent_s = link.silent_s(now_s)
    return f"gave no sign of life to rank {rank} for {silent_s:.0f} s ({_helper_of(link)})"


def _helper_of(link: Link) -> str:
    return f"its helper process {link.helper}".rstrip()


def is_overdue(link: Link, now_s: float) -> bool:
    """Say whether a neighbour has missed its beats, without a word on whether that is much."""
    return link.silent_s(now_s) > _SUSPECT_BEATS * BEAT_S
