"""Rows: the actions of one rank, packed into integer columns, for tables of millions of actions.

A row behaves as a sequence of actions, which are created on access. Passes over whole tables use
the columns instead: a rank has few kinds of actions, each of which occurs once per micro-batch.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, NoReturn, overload

import numpy as np
from numpy.typing import NDArray

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.table.actions import Action, Op

# The part of an action that does not depend on the micro-batch: op, stage and peer.
Kind = tuple[Op, int, int | None]
# Replaces the micro-batch in the columns of a row if an action has none.
NO_NUMBER: Final = -(2**31)
# Signed 32-bit integers: the checker rejects negative numbers, so they must be representable.
_INT: Final = "i"


def kind_of(action: Action) -> Kind:
    """Return the op, stage and peer of an action."""
    return action.op, action.stage, action.peer


def action_of(kind: Kind, number: int = NO_NUMBER) -> Action:
    """Return the action of a kind for a micro-batch or bucket, or for all buckets."""
    op, stage, peer = kind
    return Action(op, stage, None if number == NO_NUMBER else number, peer)


def integers(values: Iterable[int] = ()) -> "array[int]":
    """Return an array of 32-bit integers."""
    return array(_INT, values)


def numbers_of(column: Sequence[int]) -> "NDArray[np.int32]":
    """Return a column as a numpy array; an `array` shares its memory with the result."""
    return np.asarray(column, dtype=np.int32)


def column_of(values: "NDArray[np.int32]") -> "array[int]":
    """Return a numpy array as a column (`array` of 32-bit integers)."""
    column = integers()
    column.frombytes(values.astype(np.int32, copy=False).tobytes())
    return column


class Row(Sequence[Action]):
    """The packed, immutable actions of one rank, in order.

    ``which[i]`` is the index in `kinds` of the kind of action i, with kinds in order of first
    occurrence; ``numbers[i]`` is its micro-batch or bucket, or `NO_NUMBER`. Equal rows have equal
    columns.
    """

    __slots__ = ("kinds", "numbers", "which")

    def __init__(self, kinds: tuple[Kind, ...], which: "array[int]", numbers: "array[int]") -> None:
        self.kinds, self.which, self.numbers = kinds, which, numbers

    @classmethod
    def of(cls, actions: Iterable[Action]) -> "Row":
        """Pack actions into a row; a `Row` is returned unchanged."""
        if isinstance(actions, Row):
            return actions
        listed = list(actions)
        if not listed:
            return Row((), integers(), integers())
        ops, stages, given, peers = zip(*listed, strict=True)
        each = list(zip(ops, stages, peers, strict=True))
        kinds = tuple(dict.fromkeys(each))
        place = {kind: at for at, kind in enumerate(kinds)}
        if None in given:
            given = tuple(NO_NUMBER if number is None else number for number in given)
        try:
            return cls(kinds, integers(map(place.__getitem__, each)), integers(given))
        except OverflowError:
            raise ScheduleError(
                f"action: micro-batches and buckets must be below {-NO_NUMBER}, got {max(given)}"
            ) from None

    @classmethod
    def of_bytes(cls, kinds: tuple[Kind, ...], which: bytes, numbers: bytes) -> "Row":
        """Return a row from the bytes of its columns, as received from another process."""
        columns = integers(), integers()
        for column, data in zip(columns, (which, numbers), strict=True):
            column.frombytes(data)
        if len(columns[0]) != len(columns[1]) or not set(columns[0]) <= set(range(len(kinds))):
            raise ScheduleError(
                "row: columns differ in length, or contain an index without a kind of action"
            )
        return cls(kinds, *columns)

    @classmethod
    def in_order(cls, kinds: Sequence[Kind], which: "array[int]", numbers: "array[int]") -> "Row":
        """Return a row of the given columns, with its kinds sorted by first occurrence."""
        places = numbers_of(which)
        starts = np.full(len(kinds), len(which))
        starts[places[::-1]] = np.arange(len(which))[::-1]  # the first of each kind stays
        first = np.argsort(starts, kind="stable")[: np.count_nonzero(starts < len(which))]
        if len(first) == len(kinds) and (np.diff(first) > 0).all():
            return cls(tuple(kinds), which, numbers)
        place = np.zeros(len(kinds), np.int32)
        place[first] = np.arange(len(first))
        return cls(tuple(kinds[at] for at in first.tolist()), column_of(place[places]), numbers)

    @property
    def ops(self) -> frozenset[Op]:
        """Return the set of ops in the row."""
        return frozenset(op for op, _, _ in self.kinds)

    def below(self, num_microbatches: int) -> "Row":
        """Return a row of the actions without micro-batch or of one below `num_microbatches`."""
        if not self.numbers or max(self.numbers) < num_microbatches:
            return self
        return self._only(numbers_of(self.numbers) < num_microbatches)

    def only(self, keep: Callable[[Kind], bool]) -> "Row":
        """Return a row of the actions whose kind satisfies a predicate."""
        kept = [keep(kind) for kind in self.kinds]
        if all(kept):
            return self
        return self._only(np.array(kept, bool)[numbers_of(self.which)])

    def _only(self, mask: "NDArray[np.bool_]") -> "Row":
        which, numbers = numbers_of(self.which)[mask], numbers_of(self.numbers)[mask]
        return Row.in_order(self.kinds, column_of(which), column_of(numbers))

    def with_ahead(
        self,
        at: "NDArray[np.intp]",
        kinds: Sequence[Kind],
        which: "NDArray[np.int32]",
        numbers: "NDArray[np.int32]",
    ) -> "Row":
        """Return the row with actions inserted, each before the action at its position in `at`.

        The inserted actions have the kinds ``kinds[which]`` and the micro-batches or buckets
        `numbers`, and keep their order.
        """
        if not len(at):
            return self
        places = {kind: place for place, kind in enumerate(self.kinds)}
        place = np.array([places.setdefault(kind, len(places)) for kind in kinds], np.int32)
        is_new = np.zeros(len(self) + len(at), bool)
        is_new[at + np.arange(len(at))] = True
        columns: list[array[int]] = []
        for own, new in ((self.which, place[which]), (self.numbers, numbers)):
            column = np.empty(len(is_new), np.int32)
            column[is_new], column[~is_new] = new, numbers_of(own)
            columns.append(column_of(column))
        return Row.in_order(list(places), *columns)

    def digest(self) -> str:
        """Return the SHA-256 digest of the actions, which is the same in every process."""
        sha = sha256(repr([(op.value, stage, peer) for op, stage, peer in self.kinds]).encode())
        sha.update(self.which)
        sha.update(self.numbers)
        return sha.hexdigest()

    def __len__(self) -> int:
        return len(self.which)

    @overload
    def __getitem__(self, index: int) -> Action: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Action, ...]: ...

    def __getitem__(self, index: int | slice) -> Action | tuple[Action, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return action_of(self.kinds[self.which[index]], self.numbers[index])

    def __iter__(self) -> Iterator[Action]:
        kinds = self.kinds
        for which, number in zip(self.which, self.numbers, strict=True):
            op, stage, peer = kinds[which]
            yield Action(op, stage, None if number == NO_NUMBER else number, peer)

    def __add__(self, others: Iterable[Action]) -> tuple[Action, ...]:
        return (*self, *others)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Row):
            return (self.kinds, self.which, self.numbers) == (
                other.kinds,
                other.which,
                other.numbers,
            )
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Row({' '.join(map(str, self))})"


@dataclass(frozen=True)
class RemoteRow(Sequence[Action]):
    """Length and digest of another rank's row, whose actions this process does not have.

    Access to its actions raises ScheduleError.
    """

    rank: int
    num_actions: int
    of_row: str

    def digest(self) -> str:
        """Return the digest of the row."""
        return self.of_row

    def __len__(self) -> int:
        return self.num_actions

    @overload
    def __getitem__(self, index: int) -> Action: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Action, ...]: ...

    def __getitem__(self, index: int | slice) -> Action | tuple[Action, ...]:
        self._refuse()

    def __iter__(self) -> Iterator[Action]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ScheduleError(
            f"schedule: the actions of rank {self.rank} are not available in this process: each "
            f"rank keeps only its own row, and rank 0 of the job keeps all; read the table there"
        )


class RowWriter:
    """A mutable builder of a `Row`.

    To add many actions of one kind, get its index from `place` once, then append to the columns:
    the index to `which` and the micro-batches to `numbers`.
    """

    def __init__(self, kinds: Iterable[Kind] = ()) -> None:
        """Create an empty builder; `kinds` get the first indices."""
        self.which, self.numbers = integers(), integers()
        self._places = {kind: place for place, kind in enumerate(kinds)}

    @classmethod
    def on(cls, row: Row) -> "RowWriter":
        """Create a builder that contains the actions of a row."""
        writer = cls(row.kinds)
        writer.which.extend(row.which)
        writer.numbers.extend(row.numbers)
        return writer

    def place(self, kind: Kind) -> int:
        """Return the index of a kind, adding the kind if it is new."""
        return self._places.setdefault(kind, len(self._places))

    def add(self, kind: Kind, number: int = NO_NUMBER) -> None:
        """Append one action."""
        self.which.append(self._places.setdefault(kind, len(self._places)))
        self.numbers.append(number)

    def take(self, row: Row, start: int, end: int) -> None:
        """Append the actions of `row` from `start` to `end`.

        The kinds of this builder must have the same indices as in `row`.
        """
        self.which.extend(row.which[start:end])
        self.numbers.extend(row.numbers[start:end])

    def row(self) -> Row:
        """Return the row, with its kinds sorted by first occurrence."""
        return Row.in_order(list(self._places), self.which, self.numbers)
