"""Actions, the entries of a schedule table: an op on one stage for one micro-batch or bucket."""

import re
from enum import StrEnum
from typing import Final, NamedTuple

from gpipe_hpc.errors import ScheduleError


class Op(StrEnum):
    """The operation of an action, spelled as torch.distributed.pipelining spells it.

    ``F`` forward, ``B`` full backward, ``I`` input gradient only, ``W`` weight gradient only, ``R``
    recomputation; the others transfer, reduce, gather or copy.
    """

    F = "F"
    B = "B"
    I = "I"
    W = "W"
    R = "R"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    AVERAGE = "AVERAGE"
    UNSHARD = "UNSHARD"
    OFFLOAD = "OFFLOAD"
    FETCH = "FETCH"

    # Actions are dictionary keys by the million, and Enum's own hash is a slow Python function.
    __hash__ = str.__hash__


COMPUTE: Final = frozenset({Op.F, Op.B, Op.I, Op.W, Op.R})
SENDS: Final = frozenset({Op.SEND_F, Op.SEND_B})
RECEIVES: Final = frozenset({Op.RECV_F, Op.RECV_B})
COPIES: Final = frozenset({Op.OFFLOAD, Op.FETCH})
REDUCTIONS: Final = frozenset({Op.REDUCE_GRAD, Op.AVERAGE})
# Ops on a parameter bucket of a stage instead of a micro-batch.
OF_BUCKETS: Final = REDUCTIONS | {Op.UNSHARD}
BACKWARDS: Final = frozenset({Op.B, Op.I, Op.W})

_NAMES: Final = "|".join(sorted(Op, key=len, reverse=True))
_PATTERN: Final = re.compile(rf"(\d{{1,9}})({_NAMES})(\d{{0,9}})(?:@(\d{{1,9}}))?")


class Action(NamedTuple):
    """One action of a rank: an op on a stage, for one micro-batch.

    ``SEND_F(s, m)`` sends the output of stage s; ``RECV_F(s, m)`` posts the buffer for its input.
    ``SEND_B(s, m)`` sends the gradient of its input; ``RECV_B(s, m)`` posts the buffer for the
    gradient of its output.

    ``REDUCE_GRAD(s, b)`` starts the reduction of gradient bucket b of stage s across the ranks that
    hold the stage. The bucket index takes the place of the micro-batch; ``0REDUCE_GRAD``, without a
    bucket, reduces all buckets.

    ``AVERAGE(s, b)`` starts averaging the parameters of bucket b of stage s across the ranks that
    hold it, after the optimizer step, in the table of a local-SGD outer step.

    ``UNSHARD(s, b)`` makes the gathered parameters of bucket b of stage s available, before the
    first forward of the stage on each rank that holds it. The all-gather was started after the
    optimizer step.

    `peer` is the stage at the other end of a transfer over a long skip, None for a neighbour:
    ``SEND_F(s, m, d)`` sends the tensors that stage s stashed for stage d and ``RECV_F(d, m, s)``
    posts the buffer for them; ``SEND_B(d, m, s)`` sends their gradient back and ``RECV_B(s, m, d)``
    posts the buffer for it.

    ``OFFLOAD(s, m)`` copies the activations that the forward saved to host memory and ``FETCH(s,
    m)`` copies them back; both run in parallel with compute. The device memory is free after the
    next compute action of the rank.
    """

    op: Op
    stage: int
    microbatch: int | None = None
    peer: int | None = None

    @property
    def bucket(self) -> int | None:
        """Return the bucket index of the action, or None for all buckets of its stage."""
        assert self.op in OF_BUCKETS, f"{self} has no bucket"
        return self.microbatch

    def __str__(self) -> str:
        """Return the text form: ``2F0``, ``1SEND_F3``, or ``1SEND_F3@4`` over a skip."""
        if self.peer is not None:
            return f"{self.stage}{self.op.value}{self.microbatch}@{self.peer}"
        if self.microbatch is None:
            return f"{self.stage}{self.op.value}"
        return f"{self.stage}{self.op.value}{self.microbatch}"


def parse_action(text: str) -> Action:
    """Parse an action from its text form, the inverse of ``str(action)``.

    Raises:
        ScheduleError: the text is not an action, has no micro-batch, or has a peer although the op
            is not a transfer.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(
            f"action: cannot parse {text!r:.80}, expected <stage><op><micro-batch> such as 2F0 or "
            f"1SEND_F3, or 1SEND_F3@4 over a skip; ops are {', '.join(op.value for op in Op)}"
        )
    stage, name, microbatch, peer = match.groups()
    op = Op(name)
    if op not in OF_BUCKETS and not microbatch:
        raise ScheduleError(f"action: {op} needs a micro-batch, got {text!r:.80}")
    if peer and op not in SENDS and op not in RECEIVES:
        raise ScheduleError(f"action: only SEND and RECV take a peer such as @{peer}, got {text!r}")
    return Action(
        op, int(stage), int(microbatch) if microbatch else None, int(peer) if peer else None
    )
