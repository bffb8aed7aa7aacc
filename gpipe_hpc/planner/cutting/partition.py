"""The cut of a model into stages: what was asked for, and what came of it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from gpipe_hpc.errors import PartitionError
from gpipe_hpc.models import layer_parameters, stage_layers
from gpipe_hpc.planner.costs.gauges import MEASURED, Gauge, LayerTimes
from gpipe_hpc.planner.cutting.minimax import by_hand, minimax, uniform
from gpipe_hpc.planner.cutting.pins import Ends, Pin, Pins, check_pinned
from gpipe_hpc.planner.cutting.uneven import copies_for, cut_for_paces, cut_for_ranks, paces_in_rows
from gpipe_hpc.schedule import Costs

BY_TIME: Final = "time"
SIMULATED: Final = "simulated"
POLICIES = ("parameters", "uniform", BY_TIME, SIMULATED)


class Partition(NamedTuple):
    """A cut, and what it was made by.

    `counts`: the layers of each stage. `costs`: one number a layer, in the unit `measure`, which
    is ``parameters``, ``layers``, or that of the gauge (``time``, ``FLOPs``); then `times` has the
    parts of each cost. `paces`: how many times as long each stage takes as on rank 0, and
    `rank_paces` the same by rank; empty: all ranks are as fast. `num_ranks`: how many ranks share
    the stages, where some stages are on one rank less; None: each stage is on as many. Where they
    share stages `paces` are empty: see `stage_paces`. `pins`: the layers that are on their stages
    in this cut, and in those that are made anew from it. `is_open`: a layout takes a
    faster one for the same costs, where its ranks hold several stages and it finds one. `made_on`:
    the schedule and ranks for which such a one was found; empty: it is none.
    """

    counts: tuple[int, ...]
    costs: tuple[float, ...]
    measure: str
    times: tuple[LayerTimes, ...] = ()
    paces: tuple[float, ...] = ()
    rank_paces: tuple[float, ...] = ()
    num_ranks: int | None = None
    pins: Pins = ()
    is_open: bool = False
    made_on: str = ""

    @classmethod
    def stored(cls, facts: Mapping[str, Any]) -> "Partition":
        """Return the cut that a checkpoint tells of.

        Older ones called the times seconds, and did not tell of how many ranks the cut was for:
        they count as made for as many ranks of each stage.
        """
        times = facts.get("times", facts.get("seconds", ()))
        counts, costs = tuple(facts["counts"]), tuple(facts["costs"])
        paces, of_ranks = (tuple(facts.get(name, ())) for name in ("paces", "rank_paces"))
        made_by = tuple(LayerTimes(*each, *each[: 5 - len(each)]) for each in times)
        num_ranks = facts.get("num_ranks")
        pins = tuple(Pin(*each) for each in facts.get("pins", ()))
        known = counts, costs, facts["measure"], made_by, paces, of_ranks, num_ranks, pins
        return cls(*known, made_on=facts.get("made_on", ""))

    @property
    def is_measured(self) -> bool:
        """Say whether the times are seconds."""
        return bool(self.times) and self.measure == MEASURED

    @property
    def copies(self) -> list[int] | None:
        """Return how many ranks hold each stage, where ranks share stages; else None."""
        if self.num_ranks is None:
            return None
        return copies_for(self.counts, self.costs, self.num_ranks, self.rank_paces)

    @property
    def stage_paces(self) -> tuple[float, ...]:
        """Return how many times as long each stage takes as on rank 0; empty: all are as fast.

        Where ranks share it, on the average of its micro-batches.
        """
        copies = self.copies
        if copies is None or not self.rank_paces:
            return self.paces
        return paces_in_rows(copies, self.rank_paces)

    def stage_costs(self, recomputed: Sequence[Collection[int]] | None = None) -> Costs | None:
        """Return what each op of a stage takes; None where no gauge was asked.

        `recomputed`: the layers of each stage that an ``R`` runs again; None for all.
        """
        if not self.times:
            return None
        spans = stage_layers(self.counts)
        again = spans if recomputed is None else recomputed
        forward, backward, inputs, weights = (
            [sum(self.times[i][part] for i in span) for span in spans] for part in range(4)
        )
        return Costs(
            forward=forward,
            bare_forward=[
                sum(self.times[i].bare_forward if i in own else self.times[i].forward for i in span)
                for span, own in zip(spans, again, strict=True)
            ],
            backward=backward,
            input_gradient=inputs,
            weight_gradient=weights,
            recompute=[sum(self.times[i].forward for i in own) for own in again],
            paces=dict(enumerate(self.rank_paces)),
        )

    def likely_costs(self, recomputed: Sequence[Collection[int]] | None = None) -> Costs:
        """Return what each op of a stage takes; where no gauge was asked, as the cut weighs layers.

        Then the forward takes as long as either half of the backward.
        """
        known = self.stage_costs(recomputed)
        if known is not None:
            return known
        forward = [sum(self.costs[i] for i in span) for span in stage_layers(self.counts)]
        return Costs(
            forward=forward,
            input_gradient=forward,
            weight_gradient=forward,
            recompute=forward,
            paces=dict(enumerate(self.rank_paces)),
        )

    def cut_anew(self, num_stages: int, num_ranks: int | None = None) -> "Partition":
        """Return the best cut for the same costs into another number of stages.

        `num_ranks`: where these share the stages, some of which are on one rank less.
        """
        if num_ranks is not None:
            counts = cut_for_ranks(self.costs, num_stages, num_ranks, self.rank_paces, self.pins)
        elif len(self.paces) == num_stages:
            counts = cut_for_paces(self.costs, self.paces, self.pins)
        else:
            counts = minimax(self.costs, num_stages, pins=self.pins)
        return self._replace(counts=tuple(counts), num_ranks=num_ranks, made_on="")


class Paces(NamedTuple):
    """How many times as long slow ranks take: by stage, and by rank. Empty: all are alike."""

    stages: tuple[float, ...] = ()
    ranks: tuple[float, ...] = ()


ALIKE: Final = Paces()


def choose_partition(
    policy: str | Sequence[int] | Partition,
    num_stages: int,
    gauge: Gauge,
    num_ranks: int | None = None,
    paces: Paces = ALIKE,
    pins: Pins = (),
) -> Partition:
    """Cut a model into `num_stages` by one of `POLICIES`, or as given by hand.

    A Partition that was made before, in a checkpoint say, is taken as it is where it fits the
    layers and the stages, and was made for the same ranks and paces; for others its costs are cut
    anew. Where it does not fit the cut is made as that one was. `time` is what the gauge measures
    or counts; only `simulated`, which is left open, asks it, too. `num_ranks`: where these share
    the stages, and some stages are on one rank less, which get less to do. `paces`: those of slow
    ranks, which get less. `pins`: layers that have to be on certain stages. Raises PartitionError.
    """
    layers = gauge.layers
    if isinstance(policy, Partition):
        if (len(policy.counts), sum(policy.counts)) == (num_stages, len(layers)):
            made_for = policy.paces, policy.rank_paces, policy.num_ranks, policy.pins
            if made_for == (*paces, num_ranks, pins):
                return policy._replace(counts=tuple(policy.counts))
            now = policy._replace(paces=paces.stages, rank_paces=paces.ranks, pins=pins)
            return now.cut_anew(num_stages, num_ranks)
        policy = "uniform" if policy.measure == "layers" else policy.measure
    if not isinstance(policy, str):
        # A zero written by hand asks for an empty stage: it passes its input on.
        counts = by_hand(policy, len(layers), num_stages, allow_empty=True)
        check_pinned(pins, counts)
        sizes = tuple(map(float, layer_parameters(layers)))
        return Partition(tuple(counts), sizes, "parameters", (), *paces, num_ranks, pins)
    if policy == "parameters":
        sizes = tuple(map(float, layer_parameters(layers)))
        made = Partition((), sizes, policy, (), *paces, pins=pins)
        return made.cut_anew(num_stages, num_ranks)
    if policy == "uniform":
        made = Partition((), (1.0,) * len(layers), "layers", (), *paces, pins=pins)
        return made.cut_anew(num_stages, num_ranks)
    if policy not in (BY_TIME, SIMULATED):
        raise PartitionError(
            f"partition: unknown, expected one of {', '.join(POLICIES)} or the number of layers "
            f"of each stage, got {policy!r}; choose one of them"
        )
    uniform(len(layers), num_stages)  # refuse too many stages before measuring
    Ends.where(pins, len(layers), num_stages)
    times = gauge.times
    costs = tuple(each.forward + each.backward for each in times)
    made = Partition(
        (), costs, gauge.measure, times, *paces, pins=pins, is_open=policy == SIMULATED
    )
    return made.cut_anew(num_stages, num_ranks)
