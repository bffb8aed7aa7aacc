"""Rows: what one rank does, packed, so that a table of millions of actions stays small.

A row is read as a sequence of actions, each made when it is looked at. Passes over whole tables
read its columns instead: a rank has few kinds of actions, and of each one for every micro-batch.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import compress
from typing import Final, NoReturn, overload

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.table.actions import Action, Op

# What actions of several micro-batches have in common: op, stage and peer.
Kind = tuple[Op, int, int | None]
# Stands for the micro-batch of an action that has none.
NO_NUMBER: Final = -(2**31)
# Four bytes a number; negative ones are refused by the checker, so they must be kept.
_INT: Final = "i"


def kind_of(action: Action) -> Kind:
    """Return what an action has in common with those of other micro-batches."""
    return action.op, action.stage, action.peer


def action_of(kind: Kind, number: int = NO_NUMBER) -> Action:
    """Return the action of a kind for a micro-batch or bucket; without a number, for none."""
    op, stage, peer = kind
    return Action(op, stage, None if number == NO_NUMBER else number, peer)


def integers(values: Iterable[int] = ()) -> "array[int]":
    """Return whole numbers, four bytes each."""
    return array(_INT, values)


class Row(Sequence[Action]):
    """The actions of one rank, in order.

    ``which[i]`` is the place of action i's kind in `kinds`, which are in the order in which they
    come first; ``numbers[i]`` is its micro-batch or bucket, `NO_NUMBER` for none. So equal rows
    have equal columns. Nobody writes into them.
    """

    __slots__ = ("kinds", "numbers", "which")

    def __init__(self, kinds: tuple[Kind, ...], which: "array[int]", numbers: "array[int]") -> None:
        self.kinds, self.which, self.numbers = kinds, which, numbers

    @classmethod
    def of(cls, actions: Iterable[Action]) -> "Row":
        """Pack actions; a row stays as it is."""
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
                f"action: expected micro-batches and buckets below {-NO_NUMBER}, got {max(given)}"
            ) from None

    @classmethod
    def of_bytes(cls, kinds: tuple[Kind, ...], which: bytes, numbers: bytes) -> "Row":
        """Return a row of the bytes of its columns, as another process has them."""
        columns = integers(), integers()
        for column, data in zip(columns, (which, numbers), strict=True):
            column.frombytes(data)
        if len(columns[0]) != len(columns[1]) or not set(columns[0]) <= set(range(len(kinds))):
            raise ScheduleError("row: expected columns of one length that lead to its kinds")
        return cls(kinds, *columns)

    @property
    def ops(self) -> frozenset[Op]:
        """Return the ops that there are."""
        return frozenset(op for op, _, _ in self.kinds)

    def below(self, num_microbatches: int) -> "Row":
        """Return the actions of the first micro-batches."""
        if not self.numbers or max(self.numbers) < num_microbatches:
            return self
        mask = [number < num_microbatches for number in self.numbers]
        writer = RowWriter(self.kinds)
        writer.which.extend(compress(self.which, mask))
        writer.numbers.extend(compress(self.numbers, mask))
        return writer.row()

    def only(self, keep: Callable[[Kind], bool]) -> "Row":
        """Return the actions of the kinds that are to be kept."""
        kept = [keep(kind) for kind in self.kinds]
        if all(kept):
            return self
        mask = [kept[which] for which in self.which]
        writer = RowWriter()
        place = [writer.place(kind) if k else 0 for kind, k in zip(self.kinds, kept, strict=True)]
        writer.which.extend(place[which] for which in compress(self.which, mask))
        writer.numbers.extend(compress(self.numbers, mask))
        return writer.row()

    def digest(self) -> str:
        """Return a hash of the actions, the same in every process."""
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
class Elsewhere(Sequence[Action]):
    """The row of another rank, where each keeps its own alone: its length and its digest.

    To look at its actions raises ScheduleError.
    """

    rank: int
    num_actions: int
    of_row: str

    def digest(self) -> str:
        """Return the hash of the row."""
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
            f"schedule: the actions of rank {self.rank} were asked for, expected this rank's own: "
            f"each keeps its own row, and rank 0 of the job all of them; look at the table there"
        )


class RowWriter:
    """A row as it grows.

    Who adds many actions of a kind asks for its `place` once and extends the columns, `which` by
    that place and `numbers` by the micro-batch.
    """

    def __init__(self, kinds: Iterable[Kind] = ()) -> None:
        """Start empty; `kinds` have the first places."""
        self.which, self.numbers = integers(), integers()
        self._places = {kind: place for place, kind in enumerate(kinds)}

    @classmethod
    def on(cls, row: Row) -> "RowWriter":
        """Start with the actions of a row."""
        writer = cls(row.kinds)
        writer.which.extend(row.which)
        writer.numbers.extend(row.numbers)
        return writer

    def place(self, kind: Kind) -> int:
        """Return the place of a kind."""
        return self._places.setdefault(kind, len(self._places))

    def add(self, kind: Kind, number: int = NO_NUMBER) -> None:
        """Add one action."""
        self.which.append(self._places.setdefault(kind, len(self._places)))
        self.numbers.append(number)

    def take(self, row: Row, start: int, end: int) -> None:
        """Add the actions of a row from `start` to `end`; its kinds have the first places."""
        self.which.extend(row.which[start:end])
        self.numbers.extend(row.numbers[start:end])

    def row(self) -> Row:
        """Return the row, its kinds in the order in which they come first."""
        kinds = list(self._places)
        first = list(dict.fromkeys(self.which))
        if first == [*range(len(kinds))]:
            return Row(tuple(kinds), self.which, self.numbers)
        place = dict(zip(first, range(len(first)), strict=True))
        return Row(
            tuple(kinds[at] for at in first),
            integers(map(place.__getitem__, self.which)),
            self.numbers,
        )
