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
    OFFLOAD = "OFFLOAD"
    FETCH = "FETCH"

    # Actions are dictionary keys by the million, and Enum's own hash is a slow Python function.
    __hash__ = str.__hash__


COMPUTE: Final = frozenset({Op.F, Op.B, Op.I, Op.W, Op.R})
SENDS: Final = frozenset({Op.SEND_F, Op.SEND_B})
RECEIVES: Final = frozenset({Op.RECV_F, Op.RECV_B})
BACKWARDS: Final = frozenset({Op.B, Op.I, Op.W})

_PATTERN: Final = re.compile(
    r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD|OFFLOAD|FETCH|F|B|I|W|R)(\d*)"
)


class Action(NamedTuple):
    """One step of one rank: an op on a stage, for one micro-batch.

    ``SEND_F(s, m)`` sends the output of stage s, ``RECV_F(s, m)`` posts the buffer for its input,
    ``SEND_B(s, m)`` sends the gradient of its input, ``RECV_B(s, m)`` posts the buffer for the
    gradient of its output. ``microbatch`` is None for ``REDUCE_GRAD`` alone.
    """

    op: Op
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        """Return the text form: stage, op, micro-batch, as in ``2F0`` or ``1SEND_F3``."""
        if self.microbatch is None:
            return f"{self.stage}{self.op.value}"
        return f"{self.stage}{self.op.value}{self.microbatch}"


def parse_action(text: str) -> Action:
    """Read an action from its text form; the reverse of ``str(action)``."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(
            f"action: not readable, expected <stage><op><micro-batch> such as 2F0 or 1SEND_F3, "
            f"got {text!r}; ops are {', '.join(op.value for op in Op)}"
        )
    stage, name, microbatch = match.groups()
    op = Op(name)
    if (op is Op.REDUCE_GRAD) == bool(microbatch):
        needed = "no micro-batch" if op is Op.REDUCE_GRAD else "a micro-batch"
        raise ScheduleError(f"action: {op} takes {needed}, got {text!r}")
    return Action(op, int(stage), int(microbatch) if microbatch else None)
