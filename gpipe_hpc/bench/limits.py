"""What nobody can beat: the floor, and a schedule's own limit above it. Loads no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpipe_hpc.schedule import Costs, Op, Schedule, simulate


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of each layer on one micro-batch: forward, backward, and its half for the input."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input_half: tuple[float, ...]

    @classmethod
    def of(cls, answers: Sequence[Mapping[str, Sequence[float]]]) -> "LayerTimes":
        """Put together what the ranks of the floor measured, each its own layers."""
        merged = {int(index): times for answer in answers for index, times in answer.items()}
        rows = [merged[index] for index in range(len(merged))]
        forward, backward, inputs = zip(*rows, strict=True)
        # Measured apart, the half may come out above the whole.
        halves = [min(half, whole) for half, whole in zip(inputs, backward, strict=True)]
        return cls(tuple(forward), tuple(backward), tuple(halves))

    def costs(self, counts: Sequence[int]) -> Costs:
        """Return the costs of stages of these many layers."""
        spans, first = [], 0
        for count in counts:
            spans.append(slice(first, first + count))
            first += count
        forward, backward, inputs = (
            [sum(times[span]) for span in spans]
            for times in (self.forward, self.backward, self.input_half)
        )
        return Costs(
            forward=forward,
            backward=backward,
            input_gradient=inputs,
            weight_gradient=[b - i for b, i in zip(backward, inputs, strict=True)],
            recompute=forward,
        )


@dataclass(frozen=True)
class Limit:
    """The least time that a schedule leaves for a step, and the bubble that is in it."""

    step_s: float
    bubble: float


def limit_of(
    schedule: Schedule,
    counts: Sequence[int],
    times: LayerTimes,
    floor_s: float,
    floor_counts: Sequence[int],
) -> Limit:
    """Return the floor times what the schedule adds to it, simulated with the layers' times.

    Simulated without transfers, both; so what layers cost less when they are not timed one by one
    cancels out, and imbalance of either cut counts.
    """
    simulated = simulate(schedule, times.costs(counts))
    costs = times.costs(floor_counts)
    stages = range(len(floor_counts))
    forward = costs.of_compute(Op.F, len(stages))
    backward = costs.of_compute(Op.B, len(stages))
    busiest = max(forward[s] + backward[s] for s in stages) * schedule.num_microbatches
    return Limit(floor_s * simulated.makespan / busiest, simulated.bubble)
