"""States of an optimizer that lie on several ranks: each is put together on the one that writes it.

The rank with the largest part writes. Where several have as much, the name of the state picks one,
so that all write about as much. A whole tensor lies on the host: a device may have no room for it.

The others send what they hold of it, one tensor after the other, by way of ranks 1, 2, 4, 8, ...
places away: of a tensor that lies on thousands of ranks, each talks to few. Who holds what follows
from how rows of parameters are divided, so no rank is told of it. A rank needs memory for those
that it writes or hands on: of the parameters that lie across the ends of shards, no others.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

from torch import Tensor

from gpipe_hpc.comm.collectives.group import Group, Piece
from gpipe_hpc.data_parallel import OwnedParameter, ShardSpan
from gpipe_hpc.errors import CheckpointError

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline


class Part(NamedTuple):
    """What this rank has of a state that goes along with the elements of a parameter.

    `stage`: the one whose copies share it. `held`: of the parameter, `parameter` by name; `state`
    has a number for each element of it.
    """

    stage: int
    parameter: str
    held: OwnedParameter
    state: Tensor


def put_together(pipe: "Pipeline", own: Mapping[str, Part]) -> dict[str, Tensor]:
    """Return the whole tensors that this rank writes, on the host; all ranks call it.

    `own`: this rank's parts, by their names in the checkpoint. Raises CheckpointError on all ranks
    where ranks that hold parts of one parameter have other states of it.
    """
    _check_alike(pipe, own)
    found: dict[str, Tensor] = {}
    for stage in sorted(pipe.stages):  # in one order on all ranks that share some
        of_stage = {name: part for name, part in own.items() if part.stage == stage}
        found |= _put_together(pipe.sharers(stage), of_stage)
    return found


def _put_together(group: Group, own: Mapping[str, Part]) -> dict[str, Tensor]:
    """Return the whole tensors of a stage that this rank writes."""
    found: dict[str, Tensor] = {}
    for name, part in sorted(own.items()):
        shares = part.held.spans
        writer = _writer(name, shares)
        mine, whole = part.state.detach(), part.held.whole
        if group.position == writer.position:
            row = mine.new_empty(whole.numel())
            row[writer.start : writer.stop] = mine
            for side in _sides(shares, writer):
                _hand_on(group, side, 0, row)
            found[name] = row.view(whole.shape).cpu()
            continue
        side, place = _place(shares, writer, group.position)
        start, stop = _span(side, place, place + (place & -place))
        row = mine.new_empty(stop - start)
        row[part.held.start - start : part.held.stop - start] = mine
        _hand_on(group, side, place, row, start)
    return found


def _writer(name: str, shares: Sequence[ShardSpan]) -> ShardSpan:
    """Return one of the largest shares of a state; which one, its name decides."""
    most = max(share.stop - share.start for share in shares)
    largest = [share for share in shares if share.stop - share.start == most]
    return largest[crc32(name.encode()) % len(largest)]


def _sides(
    shares: Sequence[ShardSpan], writer: ShardSpan
) -> tuple[list[ShardSpan], list[ShardSpan]]:
    """Return both sides of a writer, from itself outwards."""
    at = shares.index(writer)
    return [*shares[at::-1]], [*shares[at:]]


def _place(
    shares: Sequence[ShardSpan], writer: ShardSpan, position: int
) -> tuple[list[ShardSpan], int]:
    """Return the side of a writer on which the copy at a position is, and its place there."""
    ahead, behind = _sides(shares, writer)
    side = ahead if position < writer.position else behind
    return side, abs(position - writer.position)


def _hand_on(
    group: Group, side: Sequence[ShardSpan], place: int, row: Tensor, start: int = 0
) -> None:
    """Collect into `row`, which begins at element `start`, what comes from outwards; send it on."""

    def elements(first: int, last: int) -> Tensor:
        begin, end = _span(side, first, last)
        return row[begin - start : end - start]

    def piece(at: int, tensor: Tensor) -> Piece:
        return Piece(group.ranks[side[at].position], tensor)

    distance = 1
    while distance < len(side):
        if place & distance:
            out = piece(place - distance, elements(place, place + distance))
            group.start_exchange([out], []).wait()
            return
        if place + distance < len(side):
            into = elements(place + distance, place + 2 * distance)
            group.start_exchange([], [piece(place + distance, into)]).wait()
        distance *= 2


def _span(side: Sequence[ShardSpan], first: int, last: int) -> tuple[int, int]:
    """Return where the elements of some copies of a side begin and end."""
    some = side[first:last]
    return min(share.start for share in some), max(share.stop for share in some)


_PRIME: Final = 2**61 - 1


class Apart(NamedTuple):
    """Whether states of some ranks differ from those of others: `number` is 0 where none does.

    A rank alone has a number where it shares parameters; those of all who share one add up to 0.
    """

    number: int = 0

    def plus(self, other: "Apart") -> "Apart":
        """Return the same of these ranks and of others."""
        return Apart((self.number + other.number) % _PRIME)

    @classmethod
    def of(cls, states: str, name: str, shares: Sequence[ShardSpan], position: int) -> "Apart":
        """Return that of the copy at a position, which has these states of a parameter.

        It takes what it has times a number that it knows of the copy behind it, less a number that
        it knows of the one ahead. So copies i and i + 1 have the same number w_i with other signs:
        where their states are x and y the sum has w_i (x - y) in it, and nothing else has w_i.
        """
        ahead = _hash(f"{name} {position - 1}") if position > shares[0].position else 0
        behind = _hash(f"{name} {position}") if position < shares[-1].position else 0
        return cls(_hash(states) * (behind - ahead) % _PRIME)


def _hash(text: str) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:8]) % _PRIME


def _check_alike(pipe: "Pipeline", own: Mapping[str, Part]) -> None:
    """Raise CheckpointError on all ranks unless all who share a parameter have the same states.

    One would wait for what another does not send. Each tells one number; only where their sum says
    that states differ do all hear which.
    """
    kinds: dict[str, list[str]] = {}
    for name, part in own.items():
        kinds.setdefault(part.parameter, []).append(f"{name} of {part.state.dtype}")
    stage_of = {info.name: info.stage for info in pipe.all_parameters}
    states, apart = {}, Apart()
    for name, held in pipe.owned_parameters().items():
        if held.is_part:
            states[name] = ", ".join(sorted(kinds.get(name, ["none"])))
            position = pipe.sharers(stage_of[name]).position
            apart = apart.plus(Apart.of(states[name], name, held.spans, position))
    if pipe.everybody.merge_object(apart, Apart.plus).number:
        told = pipe.everybody.all_gather_object(states)
        raise _apart(zip(pipe.everybody.ranks, told, strict=True))


def _apart(told: Iterable[tuple[int, Mapping[str, str]]]) -> CheckpointError:
    """Return the refusal of what ranks have told of the states of their parameters."""
    found: dict[str, tuple[int, str]] = {}
    for rank, states in told:
        for name, now in states.items():
            first, before = found.setdefault(name, (rank, now))
            if now != before:
                return CheckpointError(
                    f"checkpoint: expected the optimizer to keep the same states of {name} on all "
                    f"ranks that update some of it, got {before} on rank {first} and {now} on rank "
                    f"{rank}; use an optimizer whose states do not hang on values, or "
                    f"outer.shard=none"
                )
    raise AssertionError("the numbers said that states of some parameter differ")
