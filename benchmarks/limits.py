"""What nobody can beat: the floor, and a schedule's own limit above it. Loads no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from gpipe_hpc.schedule import Costs, Schedule, simulate


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

    def scaled(
        self, ranks_s: Sequence[float], counts: Sequence[int], num_microbatches: int
    ) -> "LayerTimes":
        """Return the times that add up to what each rank's whole stage takes for its micro-batches.

        Timed one by one layers cost more, and while one rank was timed others may have disturbed.
        """
        factors: list[float] = []
        for rank_s, span in zip(ranks_s, _spans(counts), strict=True):
            apart_s = num_microbatches * (sum(self.forward[span]) + sum(self.backward[span]))
            factors += [rank_s / apart_s] * (span.stop - span.start)
        forward, backward, inputs = (
            tuple(seconds * factor for seconds, factor in zip(times, factors, strict=True))
            for times in (self.forward, self.backward, self.input_half)
        )
        return LayerTimes(forward, backward, inputs)

    def costs(self, counts: Sequence[int]) -> Costs:
        """Return the costs of stages of these many layers."""
        spans = _spans(counts)
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


def _spans(counts: Sequence[int]) -> list[slice]:
    ends = [0, *accumulate(counts)]
    return [slice(*pair) for pair in pairwise(ends)]


def limit_of(
    schedule: Schedule,
    counts: Sequence[int],
    times: LayerTimes,
    ranks_s: Sequence[float],
    floor_counts: Sequence[int],
) -> Limit:
    """Return the floor with what the schedule adds to it, simulated without transfers.

    `times` of each layer are scaled to add up to `ranks_s`, each rank's time in the floor, whose
    cut is `floor_counts`.
    """
    scaled = times.scaled(ranks_s, floor_counts, schedule.num_microbatches)
    timeline = simulate(schedule, scaled.costs(counts))
    return Limit(timeline.makespan, timeline.bubble)
