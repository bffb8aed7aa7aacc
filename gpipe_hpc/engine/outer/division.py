"""How tensors lie one behind the other in a row, and how that is divided over copies of a stage."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

ALIGNED: Final = 16
"""Elements: each tensor in a row begins at a multiple of so many.

A tensor of its own begins at such an address, and kernels then load several numbers at once. At any
other address they add the numbers up in another order: on a GPU the norm of a gradient had another
last bit in a bucket than alone.
"""


def starts_of(sizes: Iterable[int]) -> list[int]:
    """Return where tensors of so many elements begin in a row; and, as the last, its length."""
    starts, end = [], 0
    for size in sizes:
        starts.append(-(-end // ALIGNED) * ALIGNED)
        end = starts[-1] + size
    return [*starts, end]


class Division(NamedTuple):
    """A row of `num_elements`, divided over `num_copies` in equal parts.

    The row is padded so that the parts are equal. With few elements the last copies have none.
    """

    num_elements: int
    num_copies: int

    @property
    def part(self) -> int:
        """Return the elements of each part, padding included."""
        return -(-self.num_elements // self.num_copies)

    @property
    def padded(self) -> int:
        """Return the elements of all parts, padding included."""
        return self.part * self.num_copies

    def span(self, position: int) -> tuple[int, int]:
        """Return where the part of the copy at `position` begins and ends, without padding."""
        start = min(position * self.part, self.num_elements)
        return start, min(start + self.part, self.num_elements)

    def holders(self, start: int, stop: int) -> range:
        """Return the positions of the copies that have some of the elements of the row in between.

        Raises ValueError where there is none in between.
        """
        if not 0 <= start < stop <= self.num_elements:
            raise ValueError(f"expected elements of {self.num_elements}, got {start} to {stop}")
        return range(start // self.part, (stop - 1) // self.part + 1)


class Piece(NamedTuple):
    """Elements of a parameter, in a row, that one copy has."""

    name: str
    start: int
    stop: int


def pieces_of(sizes: Mapping[str, int], division: Division, position: int) -> Iterator[Piece]:
    """Yield what the copy at `position` has of parameters that lie one behind the other in the row.

    `sizes`: their numbers of elements. A parameter without elements is in no piece.
    """
    first, last = division.span(position)
    for (name, count), at in zip(sizes.items(), starts_of(sizes.values()), strict=False):
        start, stop = max(first - at, 0), min(last - at, count)
        if start < stop:
            yield Piece(name, start, stop)
