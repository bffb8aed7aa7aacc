"""Lower bounds of step times: the floor, and the bound of a schedule. Does not import torch."""

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
        """Combine the measurements of the floor's ranks, each of its own layers."""
        merged = {int(index): times for answer in answers for index, times in answer.items()}
        rows = [merged[index] for index in range(len(merged))]
        forward, backward, inputs = zip(*rows, strict=True)
        # Measured separately, the half may exceed the whole.
        halves = [min(half, whole) for half, whole in zip(inputs, backward, strict=True)]
        return cls(tuple(forward), tuple(backward), tuple(halves))

    def scaled(
        self, ranks_s: Sequence[float], counts: Sequence[int], num_microbatches: int
    ) -> "LayerTimes":
        """Scale the times so that they sum to the time of each rank's whole stage per micro-batch.

        Layers timed one by one take longer, and measurements of one rank may be disturbed by
        others.
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
        """Return the costs of stages with the given numbers of layers."""
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
    """Lower bound of the step time of a schedule, and the bubble in it."""

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
    """Return the floor plus the time that the schedule adds, simulated without transfers.

    `times` of the layers are scaled to sum to `ranks_s`, the time of each rank in the floor, whose
    partition is `floor_counts`.
    """
    scaled = times.scaled(ranks_s, floor_counts, schedule.num_microbatches)
    timeline = simulate(schedule, scaled.costs(counts))
    return Limit(timeline.makespan, timeline.bubble)
