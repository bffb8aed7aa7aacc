"""Assembly of sharded optimizer states on the rank that writes them.

The rank with the largest part of a state writes it; if several are equally large, a hash of the
state's name selects one, which balances the writing. The whole tensor is assembled on the host, as
a device may have no memory for it.

The other ranks send their parts along a binary tree over distances 1, 2, 4, 8, ..., so that each
rank communicates with few others even if thousands have parts. All ranks compute the senders and
receivers from the sharding itself. A rank needs memory only for the states it writes or forwards,
which are those of parameters that cross a shard boundary.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

from torch import Tensor

from gpipe_hpc.comm.collectives.group import Group, PeerTensor
from gpipe_hpc.data_parallel import OwnedParameter, ShardSpan
from gpipe_hpc.errors import CheckpointError

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline


class StateShard(NamedTuple):
    """This rank's part of an optimizer state that has one element per parameter element.

    Args:
        stage: the stage whose replicas share the state.
        parameter: name of the parameter.
        held: the part of the parameter that this rank owns.
        state: the elements of the state for that part.
    """

    stage: int
    parameter: str
    held: OwnedParameter
    state: Tensor


def assemble_states(pipe: "Pipeline", own: Mapping[str, StateShard]) -> dict[str, Tensor]:
    """Assemble, in host memory, the sharded optimizer states that this rank writes. Collective.

    `own` maps names in the checkpoint to this rank's parts. Raises CheckpointError on all ranks if
    the owners of one parameter have different states.
    """
    _check_alike(pipe, own)
    found: dict[str, Tensor] = {}
    for stage in sorted(pipe.stages):  # the same order on all ranks
        of_stage = {name: part for name, part in own.items() if part.stage == stage}
        found |= _assemble_stage(pipe.sharers(stage), of_stage)
    return found


def _assemble_stage(group: Group, own: Mapping[str, StateShard]) -> dict[str, Tensor]:
    """Assemble the sharded optimizer states of one stage that this rank writes."""
    found: dict[str, Tensor] = {}
    for name, part in sorted(own.items()):
        shares = part.held.spans
        writer = _writer(name, shares)
        mine, whole = part.state.detach(), part.held.whole
        if group.position == writer.position:
            row = mine.new_empty(whole.numel())
            row[writer.start : writer.stop] = mine
            for side in _sides(shares, writer):
                _forward(group, side, 0, row)
            found[name] = row.view(whole.shape).cpu()
            continue
        side, place = _place(shares, writer, group.position)
        start, stop = _span(side, place, place + (place & -place))
        row = mine.new_empty(stop - start)
        row[part.held.start - start : part.held.stop - start] = mine
        _forward(group, side, place, row, start)
    return found


def _writer(name: str, shares: Sequence[ShardSpan]) -> ShardSpan:
    """Return the largest span of a parameter; a hash of the state's name breaks ties."""
    most = max(share.stop - share.start for share in shares)
    largest = [share for share in shares if share.stop - share.start == most]
    return largest[crc32(name.encode()) % len(largest)]


def _sides(
    shares: Sequence[ShardSpan], writer: ShardSpan
) -> tuple[list[ShardSpan], list[ShardSpan]]:
    """Split a parameter's spans at the writer, and order both halves by distance from it.

    The writer is the first of both halves.
    """
    at = shares.index(writer)
    return [*shares[at::-1]], [*shares[at:]]


def _place(
    shares: Sequence[ShardSpan], writer: ShardSpan, position: int
) -> tuple[list[ShardSpan], int]:
    """Return the half of the spans that contains `position`, and its distance from the writer."""
    ahead, behind = _sides(shares, writer)
    side = ahead if position < writer.position else behind
    return side, abs(position - writer.position)


def _forward(
    group: Group, side: Sequence[ShardSpan], place: int, row: Tensor, start: int = 0
) -> None:
    """Receive the parts of more distant ranks into `row`, and send the result towards the writer.

    `side` lists the spans by distance from the writer, and `place` is this rank's distance. `row`
    is a buffer that begins at element `start` of the parameter.
    """

    def elements(first: int, last: int) -> Tensor:
        begin, end = _span(side, first, last)
        return row[begin - start : end - start]

    def piece(at: int, tensor: Tensor) -> PeerTensor:
        return PeerTensor(group.ranks[side[at].position], tensor)

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
    """Return the first element and the end of consecutive spans `side[first:last]`."""
    some = side[first:last]
    return min(share.start for share in some), max(share.stop for share in some)


_PRIME: Final = 2**61 - 1


class StateCheck(NamedTuple):
    """Distributed check whether ranks that share parameters have equal optimizer states.

    Each rank contributes a number; the sum over all ranks is 0 if the states are equal.
    """

    number: int = 0

    def plus(self, other: "StateCheck") -> "StateCheck":
        """Return the sum of both numbers."""
        return StateCheck((self.number + other.number) % _PRIME)

    @classmethod
    def of(cls, states: str, name: str, shares: Sequence[ShardSpan], position: int) -> "StateCheck":
        """Return the contribution of one owner of a parameter, from a text that lists its states.

        The contribution is the hash of the states times a random number w_i shared with the next
        owner, minus the same with w_(i-1) of the previous owner. If owners i and i + 1 have states
        x and y, the sum contains w_i (x - y), and no other term contains w_i.
        """
        ahead = _hash(f"{name} {position - 1}") if position > shares[0].position else 0
        behind = _hash(f"{name} {position}") if position < shares[-1].position else 0
        return cls(_hash(states) * (behind - ahead) % _PRIME)


def _hash(text: str) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:8]) % _PRIME


def _check_alike(pipe: "Pipeline", own: Mapping[str, StateShard]) -> None:
    """Raise CheckpointError on all ranks unless all owners of each parameter have equal states.

    Otherwise a rank would wait for data that another does not send. Each rank contributes one
    number; details are exchanged only if the sum shows a difference. Collective.
    """
    kinds: dict[str, list[str]] = {}
    for name, part in own.items():
        kinds.setdefault(part.parameter, []).append(f"{name} of {part.state.dtype}")
    stage_of = {info.name: info.stage for info in pipe.all_parameters}
    states, apart = {}, StateCheck()
    for name, held in pipe.owned_parameters().items():
        if held.is_part:
            states[name] = ", ".join(sorted(kinds.get(name, ["none"])))
            position = pipe.sharers(stage_of[name]).position
            apart = apart.plus(StateCheck.of(states[name], name, held.spans, position))
    if pipe.world_group.merge_object(apart, StateCheck.plus).number:
        told = pipe.world_group.all_gather_object(states)
        raise _state_error(zip(pipe.world_group.ranks, told, strict=True))


def _state_error(told: Iterable[tuple[int, Mapping[str, str]]]) -> CheckpointError:
    """Return the error for the first parameter whose states differ between ranks."""
    found: dict[str, tuple[int, str]] = {}
    for rank, states in told:
        for name, now in states.items():
            first, before = found.setdefault(name, (rank, now))
            if now != before:
                return CheckpointError(
                    f"checkpoint: the optimizer has different states of {name} on ranks that "
                    f"update parts of it: {before} on rank {first} and {now} on rank "
                    f"{rank}; use an optimizer whose set of states does not depend on values, or "
                    f"outer.shard=none"
                )
    raise AssertionError("the check found different states, but all are equal")
