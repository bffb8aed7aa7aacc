"""Actions: what a rank does, one entry of a schedule table."""

import re
from enum import StrEnum
from typing import Final, NamedTuple

from gpipe_hpc.errors import ScheduleError


class Op(StrEnum):
    """What an action does; values are spelled as torch.distributed.pipelining spells them."""

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
# These are of a stage's buckets, not of a micro-batch.
OF_BUCKETS: Final = REDUCTIONS | {Op.UNSHARD}
BACKWARDS: Final = frozenset({Op.B, Op.I, Op.W})

_NAMES: Final = "|".join(sorted(Op, key=len, reverse=True))
_PATTERN: Final = re.compile(rf"(\d{{1,9}})({_NAMES})(\d{{0,9}})(?:@(\d{{1,9}}))?")


class Action(NamedTuple):
    """One action of a rank: an op on a stage, for one micro-batch.

    ``SEND_F(s, m)`` sends the output of stage s, ``RECV_F(s, m)`` posts the buffer for its input,
    ``SEND_B(s, m)`` sends the gradient of its input, ``RECV_B(s, m)`` posts the buffer for the
    gradient of its output.

    ``REDUCE_GRAD(s, b)`` starts reducing bucket b of the gradients of stage s over its holders; the
    bucket takes the place of the micro-batch. ``0REDUCE_GRAD``, without a bucket, reduces all.

    ``AVERAGE(s, b)`` starts averaging the parameters of bucket b of stage s over its holders, after
    the optimizer's step, in the table of an outer step.

    ``UNSHARD(s, b)`` allows use of the gathered parameters of bucket b of stage s: before the
    stage's first forward on each holder. The gathering began after the optimizer's step.

    `peer` is the stage at the other end of a transfer over a long skip, None for a neighbour:
    ``SEND_F(s, m, d)`` sends what stage s stashed for stage d, ``RECV_F(d, m, s)`` posts for it;
    ``SEND_B(d, m, s)`` sends its gradient back, ``RECV_B(s, m, d)`` posts for that.

    ``OFFLOAD(s, m)`` copies what the forward keeps to host memory, ``FETCH(s, m)`` copies it back;
    both run in parallel with compute. The device's memory is free after the next compute action of
    the rank.
    """

    op: Op
    stage: int
    microbatch: int | None = None
    peer: int | None = None

    @property
    def bucket(self) -> int | None:
        """Return which bucket of its stage the action is for; None: all."""
        assert self.op in OF_BUCKETS, f"{self} has no bucket"
        return self.microbatch

    def __str__(self) -> str:
        """Return the text form: ``2F0``, ``1SEND_F3``, over a skip ``1SEND_F3@4``."""
        if self.peer is not None:
            return f"{self.stage}{self.op.value}{self.microbatch}@{self.peer}"
        if self.microbatch is None:
            return f"{self.stage}{self.op.value}"
        return f"{self.stage}{self.op.value}{self.microbatch}"


def parse_action(text: str) -> Action:
    """Read an action from its text form, the inverse of ``str(action)``."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(
            f"action: not readable, expected <stage><op><micro-batch> such as 2F0 or 1SEND_F3, "
            f"over a skip 1SEND_F3@4, got {text!r:.80}; ops are {', '.join(op.value for op in Op)}"
        )
    stage, name, microbatch, peer = match.groups()
    op = Op(name)
    if op not in OF_BUCKETS and not microbatch:
        raise ScheduleError(f"action: {op} takes a micro-batch, got {text!r:.80}")
    if peer and op not in SENDS and op not in RECEIVES:
        raise ScheduleError(f"action: {op} has no other end, expected no @{peer}, got {text!r}")
    return Action(
        op, int(stage), int(microbatch) if microbatch else None, int(peer) if peer else None
    )
