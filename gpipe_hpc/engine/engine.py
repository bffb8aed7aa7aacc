"""The engine of one rank: its stages, connected to other ranks, and the steps that they run."""

import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from gpipe_hpc.batches import BatchSplitter, Pieces, with_tensors
from gpipe_hpc.comm.world.groups import RankContext, warm_up_groups
from gpipe_hpc.comm.world.threads import within_step
from gpipe_hpc.device.host.machine import clock_identity
from gpipe_hpc.engine.assembly import (
    TiedParameter,
    build_stages,
    chosen_backend,
    compile_layers,
    equalise_copies,
    gather_parameters,
    join_ties,
)
from gpipe_hpc.engine.batchnorm_statistics import gather_batchnorm, log_batchnorm
from gpipe_hpc.engine.gradient_norms import Norms, clip_by_norm, gather_norms, parts_of
from gpipe_hpc.engine.outsiders import ForeignParameters
from gpipe_hpc.engine.precision import LossScale
from gpipe_hpc.engine.recorder import on_one_clock
from gpipe_hpc.engine.run import Run, random_keys
from gpipe_hpc.engine.step_result import StepResult
from gpipe_hpc.engine.steps import Steps
from gpipe_hpc.engine.whole_model import WholeModel
from gpipe_hpc.engine.wiring import Tables, Wiring
from gpipe_hpc.errors import ConfigError, DataError
from gpipe_hpc.models import Layer, LossFunction, find_ties, layer_name, layer_stages
from gpipe_hpc.pytree import Nest
from gpipe_hpc.schedule import Event, Op, Schedule
from gpipe_hpc.settings import MicrobatchSplit, Outer
from gpipe_hpc.torch_compat import can_split_backward, warn_of_untested_torch

log = logging.getLogger("gpipe_hpc.pipeline")


class Engine:
    """The stages of one rank, connected to those of other ranks, and the steps that they run.

    Every rank creates it at the same time.

    Args:
        given: The model as the user passed it.
        model: The layers of the model.
        groups: The process groups of this rank.
        counts: Number of layers of each stage.
        schedules: The training table of each replica.
        tables: The lowered tables of this rank's replica.
        portions: The micro-batches of each replica.
        recomputed: For each stage the layers that ``R`` runs again; None for all.
        outer: The settings of data parallelism.
        built_on_device: Build each `LayerSpec` on the device instead of the CPU.
        compiles: The setting ``train.compile``: whether layers are compiled, or the backend.

    The other arguments are settings of the same names.
    """

    def __init__(
        self,
        given: object,
        model: Sequence[Layer],
        groups: RankContext,
        counts: Sequence[int],
        schedules: Sequence[Schedule],
        tables: Tables,
        portions: MicrobatchSplit,
        *,
        recomputed: Sequence[frozenset[int]] | None,
        seed: int,
        precision: str,
        buffers: str,
        outer: Outer,
        normalise_over_replicas: bool,
        noise_over: str | None,
        built_on_device: bool,
        compiles: bool | str,
    ) -> None:
        self._groups, self._portions, self._seed = groups, portions, seed
        self._schedule = schedules[groups.replica]
        self._num_layers = len(model)
        self._last_layer = f"layers.{len(model) - 1} ({layer_name(model[-1])})" if model else "loss"
        self._splitter = BatchSplitter()
        self._norms: Norms | None = None  # of this step's gradients before clipping
        placement = self._schedule.placement
        self.stages = build_stages(
            model,
            counts,
            placement.stages_of(groups.stage_rank),
            seed,
            groups.world,
            groups.world_group,
            precision,
            recomputed,
            built_on_device=built_on_device,
        )
        self.all_parameters = gather_parameters(self.stages, groups.pipeline)
        is_wide = any(info.is_double for info in self.all_parameters)
        self._norm_dtype = torch.float64 if is_wide else torch.float32
        self.batchnorm = gather_batchnorm(
            {index: stage.batchnorm for index, stage in self.stages.items()}, groups.pipeline
        )
        leads = groups.world.rank == 0
        if leads:
            log_batchnorm(self.batchnorm)
        uses_local_sgd = tables.averaging is not None
        normalises_together = normalise_over_replicas and bool(self.batchnorm.converted)
        if uses_local_sgd:
            _check_local_sgd(noise_over, normalises_together=normalises_together)
        wiring = Wiring.connect(
            groups.world,
            groups.mesh,
            schedules,
            normalises_together=normalises_together,
            uses_local_sgd=uses_local_sgd,
        )
        tied = self._equalise(model, counts, wiring, outer, uses_local_sgd=uses_local_sgd)
        part_of = self._measure_parts(noise_over, schedules) if noise_over else ()
        self.num_parts = len(set(part_of))
        layers = {i: m for stage in self.stages.values() for i, m in stage.layers.items()}
        self.steps = Steps(
            groups,
            tables,
            portions,
            self.stages,
            wiring,
            tied,
            [info.name for info in self.all_parameters],
            LossScale() if precision == "float16" else None,
            buffers,
            part_of,
            outer,
            seed,
            ForeignParameters(model, layers),
        )
        if leads:
            # With one replica, local SGD has nothing to average.
            applies = uses_local_sgd or (tables.buckets and not outer.uses_local_sgd)
            if applies and (reason := outer.inexact()):
                log.info("%s", reason)
            warn_of_untested_torch()
            self._warn_of_unsplit_backward()
        self.needs_inputs = 0 in self.stages
        self.needs_targets = self._schedule.num_stages - 1 in self.stages
        self.whole_model = WholeModel(
            given, model, layers, groups.world_group, is_one_process=groups.world.is_one_process
        )
        self._compile(compiles, layers)

    def parameter_sizes(self) -> list[dict[str, int]]:
        """Return the number of elements of each stage's parameters, by global name."""
        stages: dict[int, dict[str, int]] = {}
        for info in self.all_parameters:
            stages.setdefault(info.stage, {})[info.name] = info.num_elements
        return [stages[stage] for stage in sorted(stages)]

    def _equalise(
        self,
        model: Sequence[Layer],
        counts: Sequence[int],
        wiring: Wiring,
        outer: Outer,
        *,
        uses_local_sgd: bool,
    ) -> list[TiedParameter]:
        """Make copies of stages and tied parameters equal; return this rank's tied parameters."""
        groups = self._groups
        equalise_copies(self.stages, wiring.copies)
        ties = find_ties(model)
        self._tied_names = frozenset(tie.name for tie in ties)
        tied = join_ties(
            ties,
            self.stages,
            layer_stages(counts),
            self._schedule.placement,
            groups.mesh,
            groups.world,
            outer,
            uses_local_sgd=uses_local_sgd,
        )
        every = [groups.world_group, groups.pipeline, *wiring.groups(), *(t.group for t in tied)]
        warm_up_groups(every, groups.world.device)
        return tied

    def _measure_parts(self, parts: str, schedules: Sequence[Schedule]) -> tuple[int, ...]:
        """Let the stages measure gradients of parts of the batch; return `parts_of` the batch."""
        placement = self._schedule.placement
        found = parts_of(parts, [table.placement for table in schedules])
        for index, stage in self.stages.items():
            every = range(placement.num_microbatches)
            own = [m for m in every if placement.rank_of(index, m) == self._groups.stage_rank]
            stage.measure_parts(parts, own)
        return found

    def _compile(self, wish: bool | str, layers: dict[int, nn.Module]) -> None:
        backend = chosen_backend(wish, self._groups.world.device)
        if backend is None:
            return
        calls = compile_layers(layers, backend)
        for stage in self.stages.values():
            stage.run_by(calls)
        if self._groups.world.rank == 0 and Op.W in self._schedule.ops:
            log.warning(
                "compile: compiled layers compute weight gradients together with input gradients, "
                "so W of schedule %r does nothing; a schedule with full backwards (B) is as fast",
                self._schedule.name,
            )

    def _warn_of_unsplit_backward(self) -> None:
        if Op.W in self._schedule.ops and not can_split_backward():
            log.warning(
                "schedule: torch %s does not support split backwards, so weight gradients are "
                "computed together with input gradients and W of schedule %r does nothing; a "
                "schedule with full backwards (B) is as fast",
                torch.__version__,
                self._schedule.name,
            )

    def prepare(
        self, lane: str, step: int, inputs: Nest, targets: Nest, loss_fn: LossFunction | None
    ) -> Run:
        """Cut this replica's share of a batch into micro-batches for one run of a table.

        Args:
            lane: ``training``, ``evaluation`` or ``prediction``.
            step: Number of earlier steps; random numbers depend on it.
            inputs: This replica's inputs; ignored on ranks without `needs_inputs`.
            targets: This replica's targets; ignored on ranks without `needs_targets`.
            loss_fn: None to return outputs instead of a loss.
        """
        held = [index for stage in self.stages.values() for index in stage.layers]
        microbatches = self._portions.of(self._groups.replica)
        keys = random_keys(self._seed, step, microbatches, [*held, self._num_layers])
        if self.needs_inputs and inputs is None:
            raise DataError(
                f"rank {self._groups.world.rank}: expected inputs, because it holds stage 0, got "
                f"None; pass this replica's share on ranks with pipe.needs_inputs"
            )
        uses_targets = self.needs_targets and targets is not None
        trains = lane == "training"
        if trains:
            for what, batch in (("inputs", inputs), ("targets", targets)):
                self._splitter.warn_of_gradients(batch, what)
        return Run(
            lane,
            keys,
            self._num_layers,
            self._split(inputs, "inputs") if self.needs_inputs else None,
            self._split(targets, "targets") if uses_targets else None,
            loss_fn,
            step=step,
            digests=self.steps.same_data.says(step, inputs, targets) if trains else (),
            is_cut=trains and self._portions.total > 1,
        )

    def _split(self, batch: Nest, what: str) -> Pieces:
        return self._splitter.split(
            with_tensors(batch, what), self._schedule.num_microbatches, what
        )

    def train(self, run: Run, report: Callable[[], Sequence[float]] | None) -> StepResult:
        """Run forward, backward and reduction; replace the gradients of all parameters.

        `report` returns the numbers that this rank sends to all ranks with the reduction.
        """
        self._norms = None
        with within_step():
            return self.steps.train(run, report)

    def predict(self, run: Run) -> Nest:
        """Return the outputs of this replica's micro-batches, joined, on each of its ranks."""
        return self.steps.predict(run, self._last_layer)

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Clip gradients by the norm over all stages; return the norm before; a collective call."""
        own = {name: each.parameter for name, each in self.steps.owned_gradients().items()}
        return clip_by_norm(own, self._gather_norms(), max_norm)

    def grad_square(self) -> float:
        """Return the squared norm of the gradients before clipping, without tied parameters.

        A collective call, unless gradients were clipped since the last step.
        """
        known = self._norms or self._gather_norms()
        return known.square_without(self._tied_names)

    def _gather_norms(self) -> Norms:
        """Return the norms of all present gradients; store the first norms of each step."""
        owned, sharding = self.steps.owned_gradients(), self.steps.sharding
        holders = self._schedule.placement.holders
        in_parts = sharding is not None and sharding.shards_gradients
        # Each rank counts its part of a sharded gradient; the first holder counts any other one.
        is_first = not (in_parts and self._groups.replica)
        norms = gather_norms(
            {name: each.parameter for name, each in owned.items()},
            {
                info.name
                for info in self.all_parameters
                if (is_first and holders(info.stage)[0] == self._groups.stage_rank)
                or (info.name in owned and owned[info.name].is_view)
            },
            [info.name for info in self.all_parameters],
            self._groups.world_group if in_parts else self._groups.pipeline,
            self._groups.world.device,
            self._norm_dtype,
        )
        self._norms = self._norms or norms
        return norms

    def gather_events(self) -> tuple[tuple[Event, ...], ...]:
        """Return the events of the last training step for each rank of the replica.

        Times are on the clock of the replica's first rank. A collective call of the replica.
        """
        group = self._groups.pipeline
        group.all_reduce(torch.zeros(1))  # all ranks leave it at the same time
        met_s = time.perf_counter()
        events = self.steps.recorder.step.moments.events(self._groups.stage_rank)
        return on_one_clock(group.all_gather_object((clock_identity(), met_s, events)))


def _check_local_sgd(noise_over: str | None, *, normalises_together: bool) -> None:
    """Raise ConfigError for settings that combine replicas in every step."""
    if normalises_together:
        raise ConfigError(
            "outer.every: local SGD cannot be combined with normalise_over_replicas=True, which "
            "synchronises replicas in every micro-batch; use normalise_over_replicas=False, or "
            "disable outer.every"
        )
    if noise_over:
        raise ConfigError(
            f"outer.every: local SGD cannot be combined with noise_over={noise_over}, which "
            f"compares gradients of replicas in every step; disable one of them"
        )
