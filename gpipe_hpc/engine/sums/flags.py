"""The flags that ranks unite after the pipeline: which parameters were used, what buffers did."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final

import torch

from gpipe_hpc.comm.group import Gathering, Group


class Flags:
    """Numbers for flags, the same on every rank.

    The first `NUM_COMMON` concern all ranks: that a rank trains other parameters than in the step
    before (`HAS_CHANGED`), that the loss of a batch is a sum (`IS_SUM`), and that a forward wrote
    into a parameter of which there are copies (`HAS_WRITTEN`). Then come those that concern ranks
    that train together (`size` counts all): for each parameter of the model (`names`) whether a
    micro-batch has used it, and for each stage as many as `widths` says, about its buffers.
    """

    HAS_CHANGED: Final = 0
    IS_SUM: Final = 1
    HAS_WRITTEN: Final = 2
    NUM_COMMON: Final = 3

    def __init__(self, names: Sequence[str], widths: Sequence[int]) -> None:
        *starts, self.size = accumulate(widths, initial=self.NUM_COMMON + len(names))
        self._numbers = {name: self.NUM_COMMON + number for number, name in enumerate(names)}
        self._starts, self._widths = starts, widths

    @classmethod
    def gathered(cls, names: Sequence[str], own: Mapping[int, int], group: Gathering) -> "Flags":
        """Return the flags of a model; `own`: how many each stage of this rank has of buffers."""
        widths = group.merge_object(dict(own), _widest)
        return cls(names, [widths[stage] for stage in sorted(widths)])

    def of_use(self, names: Iterable[str], used: Iterable[bool]) -> set[int]:
        """Return the numbers of those parameters that were used."""
        pairs = zip(names, used, strict=True)
        return {self._numbers[name] for name, is_used in pairs if is_used}

    def of_buffers(self, stage: int, flags: Sequence[bool]) -> set[int]:
        """Return the numbers of the flags of a stage that are set."""
        start = self._starts[stage]
        return {start + offset for offset, is_set in enumerate(flags) if is_set}

    def used(self, names: Iterable[str], united: Collection[int]) -> list[bool]:
        """Return for each parameter whether any rank has used it."""
        return [self._numbers[name] in united for name in names]

    def is_any_used(self, united: Collection[int]) -> bool:
        """Return whether any rank has used any parameter."""
        return any(number in united for number in self._numbers.values())

    def buffers(self, stage: int, united: Collection[int]) -> list[bool]:
        """Return the flags of a stage that any of its holders has set."""
        start = self._starts[stage]
        return [start + offset in united for offset in range(self._widths[stage])]


def _widest(ahead: dict[int, int], behind: dict[int, int]) -> dict[int, int]:
    """Return the greater of two widths of each stage."""
    return {s: max(ahead.get(s, 0), behind.get(s, 0)) for s in ahead | behind}


def unite_flags(flags: list[bool], group: Group) -> list[bool]:
    """Return flags that are set on any rank of the group. Host memory only: no device waits."""
    if group.size == 1 or not flags:
        return flags
    counts = torch.tensor(flags, dtype=torch.int32)
    group.all_reduce(counts)
    return [count > 0 for count in counts.tolist()]
