"""Colours of pictures: one hue per op, one tint per route or per stage of a rank.

Colours of actions are the same on light and dark pages; other colours change.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Final, NamedTuple

from gpipe_hpc.schedule.table.actions import COMPUTE, Op
from gpipe_hpc.schedule.timeline import Timeline


class Hue(NamedTuple):
    """Name of an op in the legend, and the lightest and the darkest of its colours."""

    words: str
    light: str
    dark: str


# Distinguishable from each other and from idle time, also with colour blindness; a test checks
# every pair, including tints.
HUES: Final[Mapping[Op, Hue]] = MappingProxyType(
    {
        Op.F: Hue("forward", "#a8d4ef", "#2370b4"),
        Op.B: Hue("backward", "#73e8ad", "#26a08f"),
        Op.I: Hue("input gradient", "#dc87e6", "#8b4381"),
        Op.W: Hue("weight gradient", "#e8d473", "#a88a2b"),
        Op.R: Hue("recompute", "#ea9a7c", "#9c4630"),
    }
)
# Actions in parallel with compute: thin bars below the row of their rank.
BESIDE: Final[Mapping[Op, Hue]] = MappingProxyType(
    {
        Op.OFFLOAD: Hue("copy to the host", "#d9822b", "#d9822b"),
        Op.FETCH: Hue("copy back", "#3f6fd8", "#3f6fd8"),
        Op.REDUCE_GRAD: Hue("reduction over replicas", "#8a8a94", "#8a8a94"),
        Op.AVERAGE: Hue("average of parameters over replicas", "#5b5b66", "#5b5b66"),
        Op.UNSHARD: Hue("parameters gathered", "#b0569e", "#b0569e"),
    }
)
_TRANSFER: Final = Hue("a transfer that the rank waited for", "#c2417c", "#c2417c")
TRANSFERS: Final[Mapping[Op, Hue]] = MappingProxyType({Op.SEND_F: _TRANSFER, Op.SEND_B: _TRANSFER})
PAGE: Final = "#ffffff"
IDLE: Final = "#ececec"
INK: Final = "#1b1b1b"
PALE_INK: Final = "#ffffff"
MUTED: Final = "#666666"
MEMORY: Final = "#8c8c9e"
RULE: Final = "#bbbbbb"


class ColourRole(NamedTuple):
    """Name of a colour that differs on dark pages, and its replacement there."""

    name: str
    dark: str


GROUNDS: Final[Mapping[str, ColourRole]] = MappingProxyType(
    {
        PAGE: ColourRole("page", "#17171b"),
        IDLE: ColourRole("idle", "#2b2b32"),
        INK: ColourRole("ink", "#ececf1"),
        MUTED: ColourRole("muted", "#a6a6b2"),
        MEMORY: ColourRole("memory", "#7f7f92"),
        RULE: ColourRole("rule", "#55555f"),
    }
)


@cache
def fill(op: Op, tint: int, num_tints: int) -> str:
    """Return the colour of an op for a tint; tint 0 is the lightest."""
    hue = HUES[op]
    share = tint / (num_tints - 1) if num_tints > 1 else 0.0
    ends = zip(_channels(hue.light), _channels(hue.dark), strict=True)
    return "#" + "".join(f"{round(low + (high - low) * share):02x}" for low, high in ends)


def ink_on(colour: str) -> str:
    """Return a text colour that is readable on the given background colour."""
    red, green, blue = _channels(colour)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 130 else PALE_INK


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


class Tints:
    """The tint of each stage and micro-batch, derived from the ranks that ran them.

    If micro-batches take different routes through the ranks, there is one tint per route; otherwise
    one for each of the stages that a rank holds, in order.
    """

    def __init__(self, timeline: Timeline) -> None:
        """Derive the tints from the routes of the micro-batches through the ranks."""
        ways: dict[int, dict[int, int]] = {}
        for rank, row in enumerate(timeline.events):
            for event in row:
                op, stage, microbatch, _ = event.action
                if op in COMPUTE and microbatch is not None:
                    ways.setdefault(microbatch, {})[stage] = rank
        numbers: dict[tuple[tuple[int, int], ...], int] = {}
        self._way_of = {
            microbatch: numbers.setdefault(tuple(sorted(ways[microbatch].items())), len(numbers))
            for microbatch in sorted(ways)
        }
        self.num_ways = len(numbers)
        self._starts = [dict(way).get(0, 0) for way in numbers]
        self._turn_of = _turns(dict(next(iter(numbers), ())))
        self.num_turns = 1 + max(self._turn_of.values(), default=0)

    def of(self, stage: int, microbatch: int | None) -> int:
        """Return the tint index of an action."""
        if microbatch is None:
            return 0
        return self._way_of[microbatch] if self.num_ways > 1 else self._turn_of[stage]

    def __len__(self) -> int:
        """Return the number of tints."""
        return self.num_ways if self.num_ways > 1 else self.num_turns

    @property
    def words(self) -> str:
        """Return the meaning of the tints as text, "" if there is only one."""
        if self.num_ways > 1:
            starts = ", ".join(map(str, self._starts))
            return f"light to dark: micro-batches that start on rank {starts}"
        if self.num_turns > 1:
            stages: list[list[int]] = [[] for _ in range(self.num_turns)]
            for stage, turn in self._turn_of.items():
                stages[turn].append(stage)
            return f"light to dark: stages {', '.join(map(_range, stages))}"
        return ""


def _range(stages: list[int]) -> str:
    """Return consecutive stages as text, for example ``2-5``."""
    low, high = min(stages), max(stages)
    return str(low) if low == high else f"{low}-{high}"


def _turns(rank_of: Mapping[int, int]) -> dict[int, int]:
    """Return for each stage the number of earlier stages on the same rank."""
    seen: dict[int, int] = {}
    turns: dict[int, int] = {}
    for stage, rank in sorted(rank_of.items()):
        turns[stage] = seen.get(rank, 0)
        seen[rank] = turns[stage] + 1
    return turns
