"""Write the layer times measured in a run to a calibration file, for later plans."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from gpipe_hpc import __version__
from gpipe_hpc.data_parallel import GradientSize
from gpipe_hpc.device.cores.machine import parse_cpus
from gpipe_hpc.device.device import maker_name
from gpipe_hpc.models import sizes_of_layers
from gpipe_hpc.pipeline import Pipeline
from gpipe_hpc.planner.advice import KnownCosts, layer_times
from gpipe_hpc.planner.costs.calibration import Calibration, shape_of, write_calibration
from gpipe_hpc.planner.costs.cost_models import LayerTimes
from gpipe_hpc.planner.costs.counted import ModelCount
from gpipe_hpc.planner.costs.observed import (
    FittedLink,
    ObservedTransfer,
    fitted,
    gap_s,
    message_of,
    pass_of,
    sums,
    transfers,
    without_clock_offsets,
)
from gpipe_hpc.planner.costs.prices import PassCost, Prices, PricesContext
from gpipe_hpc.planner.forecast import sent_bytes
from gpipe_hpc.planner.review import by_forwards
from gpipe_hpc.planner.run_forecast import RunForecast, shares_of
from gpipe_hpc.planner.shares import microbatch_shares
from gpipe_hpc.planner.stages import count_stages
from gpipe_hpc.planner.step_time import updated_by_ranks
from gpipe_hpc.schedule import Action, Link, Timeline, arrival, counterpart
from gpipe_hpc.schedule.costs import shares_of_each
from gpipe_hpc.trainer.machines import optimizer_kind
from gpipe_hpc.trainer.session import Session
from gpipe_hpc.trainer.summary.figures import RankFigures
from gpipe_hpc.trainer.summary.ledger import RunStatistics

CALIBRATION_FILE: Final = "calibration.yaml"


def measured_times(
    pipe: Pipeline, foreseen: RunForecast, measured: Timeline, forwards_s: Mapping[int, float]
) -> tuple[LayerTimes, ...]:
    """Return the forward and backward seconds of each layer in a measured step, at rank 0's speed.

    The measured time of each stage is distributed over its layers in proportion to `forwards_s`,
    the separately timed forward seconds by layer index, or to the planned times if a layer is
    missing there.
    """
    cut = pipe.partition
    basis = by_forwards(foreseen.known.times, forwards_s, cut.counts)
    return layer_times(measured, cut.counts, basis, cut.stage_paces)


def _of_the_largest(times: Sequence[LayerTimes], shares: Sequence[float]) -> tuple[LayerTimes, ...]:
    """Scale the layer times of the mean micro-batch to the largest micro-batch.

    `shares` are the sizes of the micro-batches relative to the largest.
    """
    present = [share for share in shares if share]
    mean = sum(present) / len(present) if present else 1.0
    return tuple(LayerTimes(*(part / mean for part in each)) for each in times)


def calibrate(
    session: Session,
    ledger: RunStatistics,
    steps: Sequence[Sequence[Timeline]],
    typical: Sequence[Timeline],
    ranks: Sequence[RankFigures],
) -> None:
    """Write calibration.yaml: layer times, link speeds and overheads as measured in a run.

    Layer times are those of the replica with the most micro-batches. Nothing is written if the
    layers could not be counted.

    Args:
        session: the run.
        ledger: times and losses of its steps.
        steps: timelines of all replicas, for each traced step.
        typical: timelines of all replicas for the median step.
        ranks: measurements of all ranks.
    """
    pipe, foreseen = session.pipe, session.foreseen
    if foreseen is None:
        return
    fullest = pipe.layout.portions.fullest
    own = [each for each in ranks if each.replica == fullest]
    forwards_s = {layer.layer: layer.forward_s for each in own for layer in each.layers}
    count, device = foreseen.known.count, pipe.world.device
    seen = _TracedSteps(session, [each.host for each in ranks], steps, foreseen.known)
    gap = gap_s(timeline for replicas in steps for timeline in replicas)
    taken = list(seen.transfers(gap))
    within, between = seen.links(taken)
    summing, why_no_sums = seen.summing()
    update, norm = _passes(pipe, own, count)
    found = Calibration(
        device=device.type,
        device_name=maker_name(device),
        precision=pipe.request.precision,
        hosts=len({each.host for each in ranks}),
        ranks=pipe.world.size,
        versions={"gpipe_hpc": __version__, "torch": str(torch.__version__)},
        input_bytes=sum(count.inputs.tensors),
        model=shape_of(count),
        layers=_of_the_largest(
            measured_times(pipe, foreseen, typical[fullest], forwards_s),
            shares_of(pipe, session.batch_size),
        ),
        prices=Prices(
            gap,
            within.link if within else Link(),
            summing.link if summing else Link(),
            update,
            norm,
            _overhead_s(ledger, typical),
            PricesContext(
                device.type,
                maker_name(device),
                _cores(ranks),
                pipe.request.precision,
                optimizer_kind(session.config),
            ),
            0 if device.is_accelerator else _overhead_bytes(ranks, foreseen),
        ),
        within=within.link if within else Link(),
        between=between.link if between else Link(),
        notes=(
            *seen.notes(taken, within, between),
            *([why_no_sums] if why_no_sums else _fit_notes("all-reduce", summing)),
        ),
    )
    write_calibration(session.run_folder / CALIBRATION_FILE, found)


def _overhead_bytes(ranks: Sequence[RankFigures], foreseen: RunForecast) -> int:
    """Return the largest excess in bytes of a rank's peak memory over its planned memory."""
    planned = [foreseen.ranks[each.stage_rank].total_bytes for each in ranks]
    pairs = zip(ranks, planned, strict=True)
    return max(0, *(each.peak_memory_bytes - nbytes for each, nbytes in pairs))


@dataclass(frozen=True)
class _TracedSteps:
    """Traced steps of a run, from which the latency and bandwidth of links are fitted.

    Args:
        session: the run.
        hosts: host name of each rank.
        steps: timelines of all replicas, for each traced step.
        known: layers with their counted sizes.
    """

    session: Session
    hosts: Sequence[str]
    steps: Sequence[Sequence[Timeline]]
    known: KnownCosts

    def transfers(self, action_s: float) -> Iterator[ObservedTransfer]:
        """Yield bytes and seconds of transfers between stages whose receivers were waiting.

        `action_s` is the normal gap between two actions, which is subtracted.
        """
        pipe = self.session.pipe
        portions, num_ranks = pipe.layout.portions, pipe.layout.schedule.num_ranks
        stages = count_stages(self.known.count, pipe.partition.counts)
        for replicas in self.steps:
            for replica, timeline in enumerate(replicas):
                own = portions.of(replica)
                told = microbatch_shares(self.session.batch_size, portions.total, own)
                shares = shares_of_each(told, timeline.num_microbatches)

                def sent(maker: Action, user: Action, shares: Sequence[float] = shares) -> float:
                    assert user.microbatch is not None, "compute actions have a micro-batch"
                    send = counterpart(arrival(user, maker.stage))
                    return sent_bytes(send, stages) * shares[user.microbatch]

                yield from transfers(timeline, sent, replica * num_ranks, action_s)

    def links(
        self, taken: Sequence[ObservedTransfer]
    ) -> tuple[FittedLink | None, FittedLink | None]:
        """Fit latency and bandwidth within a host and between hosts; None if none was observed."""
        apart = [each for each in taken if self._is_between(each.source, each.destination)]
        close = [each for each in taken if not self._is_between(each.source, each.destination)]
        return fitted([(each.nbytes, each.seconds) for each in close]), fitted(
            without_clock_offsets(apart)
        )

    def _is_between(self, *ranks: int) -> bool:
        return len({self.hosts[rank] for rank in ranks}) > 1

    def summing(self) -> tuple[FittedLink | None, str]:
        """Fit the link of all-reduces within a host; return it, or None, and why it is unknown."""
        pipe = self.session.pipe
        outer, layout = pipe.request.combining, pipe.layout
        if not any(layout.tables.buckets):
            return None, "all-reduce: unknown, as no stage has several replicas"
        if outer.shard != "none" or outer.hierarchy != "none" or outer.compress != "none":
            how = "outer.shard, outer.hierarchy or outer.compress is set"
            return None, f"all-reduce: unknown, as {how}, so whole gradients are not reduced"
        sizes = {
            name: GradientSize(*size).num_bytes
            for each in sizes_of_layers(self.known.layers)
            for name, size in each.items()
        }
        buckets = [
            [sum(sizes[name] for name in bucket) for bucket in of_stage]
            for of_stage in layout.tables.buckets
        ]
        num_ranks = layout.schedule.num_ranks
        taken = [each for step in self.steps for each in sums(step, buckets, num_ranks)]
        close = [message_of(each) for each in taken if not self._is_between(*each.ranks)]
        found = fitted(close)
        why = "" if found is not None else "all-reduce: unknown, as none ran within one host"
        return found, why

    def notes(
        self,
        taken: Sequence[ObservedTransfer],
        within: FittedLink | None,
        between: FittedLink | None,
    ) -> Iterator[str]:
        """Yield notes about link parameters that could not be measured."""
        if not taken:
            yield "transfers: unknown, as no rank was waiting when a transfer began"
            return
        yield from _fit_notes("transfers within a host", within)
        if len(set(self.hosts)) > 1:
            yield from _fit_notes("transfers between hosts", between)


def _fit_notes(what: str, found: FittedLink | None) -> list[str]:
    """Return a note if a link is unknown or fitted to one message size only; else an empty list."""
    if found is None:
        return [f"{what}: unknown, as none was observed (between hosts: in each direction)"]
    if found.num_sizes == 1:
        return [f"{what}: all of one size, so their whole time is attributed to bandwidth"]
    return []


def _passes(
    pipe: Pipeline, ranks: Sequence[RankFigures], count: ModelCount
) -> tuple[PassCost, PassCost]:
    """Return the costs of the optimizer step and of the gradient norm.

    The cost of the norm is the shortest time of any rank divided by the largest number of elements
    of any rank, as the times of the other ranks include waiting.
    """
    copies = 1 if pipe.request.combining.shard == "none" else pipe.layout.replicas
    held = updated_by_ranks(count, pipe.partition.counts, pipe.layout.schedule.placement, copies)
    update = pass_of(
        [(*held[each.stage_rank], each.optimizer_s) for each in ranks if each.optimizer_s]
    )
    clipped = [each.clipping_s for each in ranks if each.clipping_s is not None]
    most = max(each.num_elements for each in held)
    return update, PassCost(0.0, 0.0, min(clipped) / most if clipped and most else 0.0)


def _overhead_s(ledger: RunStatistics, typical: Sequence[Timeline]) -> float:
    """Return the seconds of a step outside its pipeline, all-reduce, gradient norm and optimizer.

    Time for reading data is excluded, as in plans.
    """
    known = ledger.medians()
    if known["step_time_s"] is None:
        return 0.0
    parts = ("pipeline_s", "reading_ahead_s", "clipping_s", "optimizer_s")
    end_s = max(each.end_of_compute for each in typical)
    tail_s = max(each.start_s + each.makespan for each in typical) - end_s
    return max(0.0, float(known["step_time_s"] - sum(known[name] for name in parts) - tail_s))


def _cores(ranks: Sequence[RankFigures]) -> int:
    """Return the number of cores available to all ranks on the first rank's host."""
    given = [each.cpus for each in ranks if each.host == ranks[0].host]
    cpus = {cpu for text in given if text for cpu in parse_cpus(text)}
    return len(cpus) or os.cpu_count() or 1
