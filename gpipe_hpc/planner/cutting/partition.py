"""The partition of a model into stages, with the costs and settings from which it was made."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from gpipe_hpc.errors import PartitionError
from gpipe_hpc.models import layer_parameters, stage_layers
from gpipe_hpc.planner.costs.cost_models import MEASURED, CostModel, LayerTimes
from gpipe_hpc.planner.cutting.minimax import check_given_cut, minimax, uniform
from gpipe_hpc.planner.cutting.pins import EndRanges, Pin, Pins, check_pinned
from gpipe_hpc.planner.cutting.unequal_ranks import (
    copies_for,
    cut_for_paces,
    cut_for_ranks,
    paces_in_rows,
)
from gpipe_hpc.schedule import Costs

BY_TIME: Final = "time"
SIMULATED: Final = "simulated"
POLICIES = ("parameters", "uniform", BY_TIME, SIMULATED)


class Partition(NamedTuple):
    """A partition of the layers into stages, and the data from which it was computed.

    Attributes:
      counts: number of layers of each stage.
      costs: cost of each layer in the unit `measure`: ``parameters``, ``layers``, or that of the
        cost model (``time``, ``FLOPs``).
      times: with a cost model, the times of each layer's passes.
      paces: slowdown of each stage relative to rank 0; empty if all are equal, and if ranks share
        stages (then see `stage_paces`).
      rank_paces: slowdown of each rank; empty if all are equal.
      num_ranks: number of ranks that share the stages if some stages have one rank less; else None.
      pins: layers pinned to stages, also in partitions derived from this one.
      is_open: whether a layout may use a faster partition for the same costs if its ranks hold
        several stages.
      made_on: schedule and ranks for which such a faster partition was found; else empty.
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
        """Load the partition stored in a checkpoint.

        Older checkpoints named the times seconds, and did not store the number of ranks; their
        partitions count as made for equally many ranks per stage.
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
        """Return whether the times are measured seconds."""
        return bool(self.times) and self.measure == MEASURED

    @property
    def copies(self) -> list[int] | None:
        """Return the number of ranks of each stage if ranks share stages; else None."""
        if self.num_ranks is None:
            return None
        return copies_for(self.counts, self.costs, self.num_ranks, self.rank_paces)

    @property
    def stage_paces(self) -> tuple[float, ...]:
        """Return the slowdown of each stage relative to rank 0; empty if all are equal.

        If ranks share a stage, its slowdown is the mean over its micro-batches.
        """
        copies = self.copies
        if copies is None or not self.rank_paces:
            return self.paces
        return paces_in_rows(copies, self.rank_paces)

    def stage_costs(self, recomputed: Sequence[Collection[int]] | None = None) -> Costs | None:
        """Return the time of each op of each stage, or None without a cost model.

        `recomputed`: the layers of each stage that ``R`` recomputes; None for all.
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
        """Return the time of each op of each stage; without layer times, estimate it from costs.

        The estimate assumes that the forward takes as long as each half of the backward.
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
        """Return the best partition for the same costs into another number of stages.

        `num_ranks`: number of ranks that share the stages if some stages have one rank less.
        """
        if num_ranks is not None:
            counts = cut_for_ranks(self.costs, num_stages, num_ranks, self.rank_paces, self.pins)
        elif len(self.paces) == num_stages:
            counts = cut_for_paces(self.costs, self.paces, self.pins)
        else:
            counts = minimax(self.costs, num_stages, pins=self.pins)
        return self._replace(counts=tuple(counts), num_ranks=num_ranks, made_on="")


class Slowdowns(NamedTuple):
    """Slowdowns of slow ranks, by stage and by rank; empty if all are equal."""

    stages: tuple[float, ...] = ()
    ranks: tuple[float, ...] = ()


ALIKE: Final = Slowdowns()


def choose_partition(
    policy: str | Sequence[int] | Partition,
    num_stages: int,
    cost_model: CostModel,
    num_ranks: int | None = None,
    paces: Slowdowns = ALIKE,
    pins: Pins = (),
) -> Partition:
    """Partition a model into `num_stages` by one of `POLICIES`, or as the user gave it.

    An existing Partition (for example of a checkpoint) is used unchanged if it fits the layers and
    stages and was made for the same ranks and slowdowns. If only those differ, its costs are
    partitioned again; if it does not fit, its policy is applied again. The policies ``time`` and
    ``simulated`` use the times of the cost model; the layout may replace the partition of
    ``simulated`` by a faster one.

    Args:
      num_ranks: number of ranks that share the stages if some stages have one rank less.
      paces: slowdowns of ranks; slow ranks get less work.
      pins: layers that must be on given stages.

    Raises PartitionError.
    """
    layers = cost_model.layers
    if isinstance(policy, Partition):
        if (len(policy.counts), sum(policy.counts)) == (num_stages, len(layers)):
            made_for = policy.paces, policy.rank_paces, policy.num_ranks, policy.pins
            if made_for == (*paces, num_ranks, pins):
                return policy._replace(counts=tuple(policy.counts))
            now = policy._replace(paces=paces.stages, rank_paces=paces.ranks, pins=pins)
            return now.cut_anew(num_stages, num_ranks)
        policy = "uniform" if policy.measure == "layers" else policy.measure
    if not isinstance(policy, str):
        # A zero given by the user requests an empty stage, which forwards its input.
        counts = check_given_cut(policy, len(layers), num_stages, allow_empty=True)
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
            f"partition: unknown policy {policy!r}; set one of {', '.join(POLICIES)}, or the "
            f"number of layers of each stage"
        )
    uniform(len(layers), num_stages)  # raises for too many stages before measuring
    EndRanges.where(pins, len(layers), num_stages)
    times = cost_model.times
    costs = tuple(each.forward + each.backward for each in times)
    made = Partition(
        (), costs, cost_model.measure, times, *paces, pins=pins, is_open=policy == SIMULATED
    )
    return made.cut_anew(num_stages, num_ranks)
