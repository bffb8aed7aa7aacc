"""What actions cost: the simulator's input."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.actions import Op

Cost = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """How long each op takes, one number for all stages or one for each, in any unit of time.

    Without `backward`, ``B`` costs `input_gradient` plus `weight_gradient`. ``send[s]`` is one
    transfer over the boundary behind stage s, in either direction. None: not given.
    """

    forward: Cost | None = None
    backward: Cost | None = None
    input_gradient: Cost | None = None
    weight_gradient: Cost | None = None
    recompute: Cost | None = None
    send: Cost = 0.0

    def of_compute(self, op: Op, num_stages: int) -> list[float]:
        """Return the cost of a compute op on each stage; refuse an op without one."""
        if op is Op.B and self.backward is None:
            inputs, weights = (self.of_compute(part, num_stages) for part in (Op.I, Op.W))
            return [first + second for first, second in zip(inputs, weights, strict=True)]
        field = _FIELD_OF[op]
        cost: Cost | None = getattr(self, field)
        if cost is None:
            raise ScheduleError(f"costs: no cost for {op}, expected one, got none; give {field}=")
        return _per_stage(field, cost, num_stages)

    def of_transfer(self, num_stages: int) -> list[float]:
        """Return the cost of a transfer over the boundary behind each stage."""
        return _per_stage("send", self.send, num_stages)


_FIELD_OF: Final = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input_gradient",
    Op.W: "weight_gradient",
    Op.R: "recompute",
}


def _per_stage(field: str, cost: Cost, num_stages: int) -> list[float]:
    if isinstance(cost, Sequence):
        if len(cost) != num_stages:
            raise ScheduleError(
                f"costs: {field} has a number for each stage, expected {num_stages}, "
                f"got {len(cost)}"
            )
        costs = [float(one) for one in cost]
    else:
        costs = [float(cost)] * num_stages
    for one in costs:
        if not (math.isfinite(one) and one >= 0):
            raise ScheduleError(f"costs: {field} is a time, expected 0 or more, got {one}")
    return costs
