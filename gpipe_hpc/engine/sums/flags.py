"""The flags that ranks unite behind the pipeline: which parameter was used, what buffers did."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

from gpipe_hpc.comm.group import Group


class Flags:
    """Numbers for flags, the same on every rank.

    Two of each parameter of the model (`names`): whether a micro-batch has used it, and whether it
    is frozen. Behind them `widths` of each stage: what the holders of its buffers must know of one
    another.
    """

    def __init__(self, names: Sequence[str], widths: Sequence[int]) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}
        self._widths = widths
        *self._starts, self.size = accumulate(widths, initial=2 * len(names))

    @classmethod
    def gathered(cls, names: Sequence[str], own: Mapping[int, int], group: Group) -> "Flags":
        """Return the flags of a model; `own`: how many each stage of this rank has of buffers."""
        widths: dict[int, int] = {}
        for part in group.all_gather_object(dict(own)):
            for stage, width in part.items():
                widths[stage] = max(width, widths.get(stage, 0))
        return cls(names, [widths[stage] for stage in sorted(widths)])

    def of_use(self, names: Iterable[str], used: Iterable[bool]) -> set[int]:
        """Return the numbers of those parameters that were used."""
        pairs = zip(names, used, strict=True)
        return {self._numbers[name] for name, is_used in pairs if is_used}

    def of_frozen(self, names: Iterable[str]) -> set[int]:
        """Return the numbers that say of parameters that they are frozen."""
        return {len(self._numbers) + self._numbers[name] for name in names}

    def frozen_in_part(self, united: Collection[int]) -> list[str]:
        """Return the parameters that some rank has used and another has frozen."""
        count = len(self._numbers)
        return [n for n, at in self._numbers.items() if at in united and count + at in united]

    def of_buffers(self, stage: int, flags: Sequence[bool]) -> set[int]:
        """Return the numbers of those flags of a stage that are set."""
        start = self._starts[stage]
        return {start + offset for offset, is_set in enumerate(flags) if is_set}

    def used(self, names: Iterable[str], united: Collection[int]) -> list[bool]:
        """Say of each parameter whether any rank has used it."""
        return [self._numbers[name] in united for name in names]

    def buffers(self, stage: int, united: Collection[int]) -> list[bool]:
        """Return a stage's flags of all its holders."""
        start = self._starts[stage]
        return [start + offset in united for offset in range(self._widths[stage])]
