"""`Pipeline`: a model cut into stages on ranks, trained as if it were in one piece."""

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from gpipe_hpc import checkpoint
from gpipe_hpc.batches import BatchSplitter, Pieces, share_of, unwrapped, with_tensors
from gpipe_hpc.comm.collectives.group import Gathering, Group
from gpipe_hpc.comm.world.groups import MeshGroups, check_agreement, warm_up_groups
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.comm.world.threads import within_step
from gpipe_hpc.comm.world.world import together
from gpipe_hpc.config import Keywords, by_keyword
from gpipe_hpc.data_parallel import (
    Factory,
    NoParameters,
    OptimizerSharding,
    OwnedParameter,
    log_inexact,
    make_optimizer,
)
from gpipe_hpc.device.cores.bind import bind
from gpipe_hpc.device.host.clock import clock_identity
from gpipe_hpc.engine.backward.outsiders import Outsiders
from gpipe_hpc.engine.compiling import chosen_backend, compile_layers
from gpipe_hpc.engine.memory_snapshot import MemorySnapshot, OutOfMemoryError
from gpipe_hpc.engine.precision import scaling
from gpipe_hpc.engine.recorder import Moments, Recorded, StepMarks, StepTimes, on_one_clock
from gpipe_hpc.engine.run import Run, random_keys
from gpipe_hpc.engine.stages.assembly import (
    build_stages,
    by_stage,
    equalise_copies,
    gather_parameters,
)
from gpipe_hpc.engine.stages.whole_model import WholeModel
from gpipe_hpc.engine.stages.wiring import Wiring, wire
from gpipe_hpc.engine.steps import Steps, Tell
from gpipe_hpc.engine.sums.loss_scale import LossScale
from gpipe_hpc.engine.sums.norms import Norms, clip_by_norm, gather_norms
from gpipe_hpc.engine.sums.results import StepResult
from gpipe_hpc.engine.sums.squares import parts_of
from gpipe_hpc.engine.sums.statistics import gather_batchnorm, log_batchnorm
from gpipe_hpc.engine.sums.tied import TiedParameter, join_ties
from gpipe_hpc.errors import ConfigError, DataError, DeviceMemoryError, GpipeError
from gpipe_hpc.models import (
    Layer,
    LossFunction,
    find_ties,
    layer_name,
    layer_stages,
    normalise_layers,
    parameter_sizes,
)
from gpipe_hpc.planner import (
    Counted,
    Example,
    Gauge,
    Measured,
    Request,
    check_conservation,
    cut_table,
)
from gpipe_hpc.planner.deciding import decide_layout, with_open_choices
from gpipe_hpc.planner.forecast import RankForecast
from gpipe_hpc.planner.memory.exhausted import explain_exhausted
from gpipe_hpc.pytree import Nest
from gpipe_hpc.schedule import Op, Timeline
from gpipe_hpc.torch_compat import can_split_backward, warn_of_untested_torch

log = logging.getLogger("gpipe_hpc.pipeline")

O = TypeVar("O", bound=torch.optim.Optimizer)


class Pipeline:
    """A sequential model on `stages` x `replicas` ranks. Every rank makes it.

    Args:
        layers: An nn.Sequential, or a sequence of modules and LayerSpecs. A rank builds only its
            own layers.
        loss_fn: A function of (output, target) that returns the mean over the micro-batch's samples
            (never a sum alone), or a pair (sum, weight), as (sum, number of tokens). A third value
            holds metrics. None: the pipeline only predicts.

    All else is given by keyword. The keywords are settings of the command line, with the same
    meaning: docs/reference/library.md lists them.

    Raises ConfigError, ModelError, PartitionError or ScheduleError for what cannot work, and
    PeerError if another rank found it.
    """

    @by_keyword(Keywords)
    def __init__(
        self, layers: nn.Sequential | Sequence[Layer], loss_fn: LossFunction, given: Keywords
    ) -> None:
        assert given.world is not None, "joined before"
        self.world = given.world
        with together(self.world, "start"):
            request = given.request()
            model = normalise_layers(layers)
            facts = {"number of layers": len(model), **_name_of(loss_fn), **request.facts()}
            facts |= {"bind": given.bind, "num_threads": given.num_threads}
            check_agreement(self.world.everybody, facts)
            if given.bind != "none" or given.num_threads is not None:
                self._say(bind(self.world, given.bind, given.num_threads).lines)
            gauge = self._gauge(request, model, loss_fn, given.example)
        request = with_open_choices(request, self.world, gauge, given.timeout_s)
        with together(self.world, "start"):
            request = request.on(self.world.size)
            assert not isinstance(request.stages, str), "checked, and found by now"
            self._norms: Norms | None = None
            self._planned: RankForecast | None = None
            self.mesh = Mesh.fit(self.world.size, request.stages, request.replicas)
            assert request.portions, "each replica has micro-batches"
            self._site = MeshGroups.of(self.world, self.mesh)
        self.request = replace(request, stages=self.mesh.stages)
        self.loss_fn, self.num_layers = loss_fn, len(model)
        self._splitter = BatchSplitter()
        self._last_layer = f"layers.{len(model) - 1} ({layer_name(model[-1])})" if model else "loss"
        self.seed, self.precision, self.steps_done = request.seed, request.precision, 0
        self.layout = decide_layout(self.request, self._site, gauge, given.timeout_s)
        self.partition = self.layout.partition
        self._own = self.layout.of(self.replica)
        self.schedule = self._own.schedule
        with together(self.world, "start"):
            check_agreement(self.everybody, {"layout": self.layout.digest()})
            self._build(model)
            self._whole_model = WholeModel(
                layers,
                model,
                {i: m for stage in self.stages.values() for i, m in stage.layers.items()},
                self.everybody,
                is_one_process=self.world.is_one_process,
            )
            self._compile(request.compile)

    def _say(self, lines: Iterable[str]) -> None:
        if self.world.rank == 0:
            for line in lines:
                log.info("%s", line)

    def _gauge(
        self,
        request: Request,
        model: list[Layer],
        loss_fn: LossFunction,
        example: tuple[Nest, Nest] | None,
    ) -> Gauge:
        """Return what measures the layers on one micro-batch, if there is one."""
        given = None
        if example is not None:
            inputs, targets = (unwrapped(with_tensors(part, "example")) for part in example)
            given = Example(inputs, targets, loss_fn, request.seed, self.world.device)
        counted = Counted(model, given, request.precision, shares_casts=not request.offload)
        return Measured(counted)

    def _compile(self, wish: bool | str) -> None:
        """Let the layers run compiled, if that is wished."""
        backend = chosen_backend(wish, self.world.device)
        if backend is None:
            return
        stages = self.stages.values()
        calls = compile_layers({i: m for s in stages for i, m in s.layers.items()}, backend)
        for stage in stages:
            stage.run_by(calls)
        if self.world.rank == 0 and Op.W in self.schedule.ops:
            log.warning(
                "compile: compiled layers make weight gradients together with those of inputs, so "
                "W of schedule %r has nothing to do; a schedule whose backward is B is as fast",
                self.schedule.name,
            )

    def _build(self, model: list[Layer]) -> None:
        """Build this rank's stages, connect them with those of other ranks, and make their steps.

        Every rank calls it.
        """
        request, layout, world = self.request, self._own, self.world
        self._build_stages(model)
        self._check_local_sgd()
        wiring, tied = self._connect(model)
        part_of = self._measure_parts(request.noise_over) if request.noise_over else ()
        self.num_parts = len(set(part_of))
        self._steps = Steps(
            self._site,
            layout.tables,
            self.layout.portions,
            self.stages,
            wiring,
            tied,
            [info.name for info in self.all_parameters],
            scaling(self.precision),
            request.buffers,
            part_of,
            request.combining,
            request.seed,
            Outsiders(model, {i: m for s in self.stages.values() for i, m in s.layers.items()}),
        )
        if world.rank == 0:
            # Of one replica, local SGD has nothing to average.
            is_combined = bool(layout.tables.buckets) and not request.combining.uses_local_sgd
            if is_combined or self.uses_local_sgd:
                log_inexact(request.combining)
            self._warn_of_torch()
        self._outer_due, self._versions_stepped = False, 0
        self.last_outer_step = 0
        self._has_optimizer = False
        self.needs_inputs = 0 in self.stages
        self.needs_targets = self.schedule.num_stages - 1 in self.stages

    def _warn_of_torch(self) -> None:
        warn_of_untested_torch()
        if Op.W in self.schedule.ops and not can_split_backward():
            log.warning(
                "schedule: torch %s lacks what a split backward needs, so weight gradients are "
                "made together with those of inputs and W of schedule %r has nothing to do; a "
                "schedule whose backward is B is as fast",
                torch.__version__,
                self.schedule.name,
            )

    def _build_stages(self, model: list[Layer]) -> None:
        """Build the stages of this rank, and learn from the others what the whole model has."""
        placement, pipeline = self.schedule.placement, self._site.pipeline
        self.stages = build_stages(
            model,
            self.partition.counts,
            placement.stages_of(self.stage_rank),
            self.seed,
            self.world,
            self.everybody,
            self.precision,
            self._own.recomputed,
            built_on_device=self.request.build_on == "device",
        )
        self.all_parameters = gather_parameters(self.stages, pipeline)
        is_wide = any(info.is_double for info in self.all_parameters)
        self._norm_dtype = torch.float64 if is_wide else torch.float32
        check_conservation(parameter_sizes(model), by_stage(self.all_parameters))
        self._cut_table = cut_table(
            model,
            self.partition.counts,
            holders=[placement.holders(s) for s in range(placement.num_stages)],
            costs=self.partition.costs,
            measure=self.partition.measure,
            paces=self.partition.stage_paces,
            pins=self.partition.pins,
        )
        self.batchnorm = gather_batchnorm(
            {index: stage.batchnorm for index, stage in self.stages.items()}, pipeline
        )
        if self.world.rank == 0:
            log_batchnorm(self.batchnorm)

    @property
    def _normalises_together(self) -> bool:
        return self.request.normalise_over_replicas and bool(self.batchnorm.converted)

    def _check_local_sgd(self) -> None:
        """Refuse what joins replicas in every step where they train apart."""
        if not self.uses_local_sgd:
            return
        if self._normalises_together:
            raise ConfigError(
                "outer.every: replicas train apart, expected normalise_over_replicas=False, got "
                "True, which joins them in every micro-batch; set one or the other"
            )
        if self.request.noise_over:
            raise ConfigError(
                f"outer.every: replicas train apart, expected no noise_over, which compares their "
                f"gradients in every step, got {self.request.noise_over}; set one or the other"
            )

    def _connect(self, model: list[Layer]) -> tuple[Wiring, list[TiedParameter]]:
        """Open this rank's channels, form its groups, and make copies and tied weights equal."""
        world, mesh, placement = self.world, self.mesh, self.schedule.placement
        wiring = wire(
            world,
            mesh,
            [self.layout.of(replica).schedule for replica in range(mesh.replicas)],
            normalises_together=self._normalises_together,
            is_apart=self.uses_local_sgd,
        )
        equalise_copies(self.stages, wiring.copies)
        ties = find_ties(model)
        self._tied_names = frozenset(tie.name for tie in ties)
        tied = join_ties(
            ties,
            self.stages,
            layer_stages(self.partition.counts),
            placement,
            mesh,
            world,
            self.request.combining,
            uses_local_sgd=self.uses_local_sgd,
        )
        groups = [self.everybody, self._site.pipeline, *wiring.groups(), *(t.group for t in tied)]
        warm_up_groups(groups, world.device)
        return wiring, tied

    def _measure_parts(self, parts: str) -> tuple[int, ...]:
        """Let this rank's stages measure the parts of gradients; return which there are."""
        placement = self.schedule.placement
        tables = [self.layout.of(replica).schedule for replica in range(self.mesh.replicas)]
        found = parts_of(parts, [table.placement for table in tables])
        for index, stage in self.stages.items():
            every = range(placement.num_microbatches)
            own = [m for m in every if placement.rank_of(index, m) == self.stage_rank]
            stage.measure_parts(parts, own)
        return found

    @property
    def everybody(self) -> Gathering:
        """Return the group of all ranks."""
        return self._site.everybody

    @property
    def of_place(self) -> Gathering:
        """Return the group of the ranks at this position in all replicas."""
        return self._site.of_place

    @property
    def replica(self) -> int:
        """Return this rank's replica; world rank = replica x stages + stage_rank."""
        return self._site.replica

    @property
    def stage_rank(self) -> int:
        """Return this rank's position in its pipeline."""
        return self._site.stage_rank

    @property
    def num_microbatches(self) -> int:
        """Return the number of micro-batches in this replica's step."""
        return self.schedule.num_microbatches

    @property
    def microbatches(self) -> range:
        """Return which micro-batches of the global batch are this replica's."""
        return self.layout.portions.of(self.replica)

    @property
    def num_global_microbatches(self) -> int:
        """Return the number of micro-batches of the global batch."""
        return self.layout.portions.total

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters by global name (`layers.<index>.<name>`), each once.

        Waits until parameters that other ranks have updated are there.
        """
        self.await_parameters()
        named = {n: p for s in self.stages.values() for n, p in s.named_parameters().items()}
        yield from named.items()

    def parameters(self) -> list[nn.Parameter]:
        """Return this rank's parameters; empty if its layers have none.

        torch's optimizers accept the empty list too.
        """
        found = [parameter for _, parameter in self.named_parameters()]
        return found or NoParameters(self.world.device.torch)

    def optimizer(self, factory: Factory[O]) -> O:
        """Return the optimizer that `factory` creates for this rank's parameters.

        Every rank calls it. `factory(parameters)` returns a torch.optim.Optimizer, with any groups
        and options. With ``outer.shard`` it then holds this rank's part of them, as one-dimensional
        or whole parameters, and its state is divided over replicas and mirrored stages. Raises
        ConfigError for an optimizer that cannot be divided so, or that looks across parameters
        although a rank does not have all of them.
        """
        with together(self.world, "making the optimizer"):
            whole = dict(self.named_parameters())
            has_all = self.mesh.stages == 1
            optimizer = make_optimizer(factory, whole, self._steps.sharding, has_all=has_all)
            self._has_optimizer = True
            return optimizer

    @property
    def is_sharded(self) -> bool:
        """Return whether the optimizer's state is divided over the copies of stages."""
        return self._steps.sharding is not None

    def sharers(self, stage: int) -> Group:
        """Return the group that combines gradients of one of this rank's stages."""
        return self._steps.sharers(stage)

    def owned_parameters(self) -> dict[str, OwnedParameter]:
        """Return what this rank's optimizer updates, by global name."""
        return self._steps.owned_parameters()

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the gradients of this rank's parameters by global name.

        Every rank calls it. They are `.grad`, or gathered copies if they are divided over replicas;
        None if no replica used the parameter.
        """
        with together(self.world, "gathering gradients"):
            return self._steps.gradients()

    def say_what_is_left(self) -> None:
        """Log pending messages about the steps so far; waits for the device.

        Which buffers differed is known only when the device has finished; it is logged with the
        next step, with a checkpoint, or by this call.
        """
        self._steps.say_all()

    def await_parameters(self) -> None:
        """Wait until all parameters that other ranks have updated are there."""
        sharding = self._steps.sharding
        if sharding is not None and sharding.is_gathering:
            self._await(sharding)

    def _await(self, sharding: OptimizerSharding) -> None:
        """Wait for what the optimizer's step has started on all ranks; no new call of theirs."""
        with together(self.world, "gathering parameters"):
            sharding.wait()

    def share(self, num_samples: int) -> slice:
        """Return the slice of a global batch of `num_samples` that is this replica's."""
        own = self.microbatches
        return share_of(num_samples, self.num_global_microbatches, own.start, len(own))

    def step(
        self, inputs: Nest = None, targets: Nest = None, tell: Tell | None = None
    ) -> StepResult:
        """Run forward, backward and reduction on this replica's share of a global batch.

        Every rank calls it. Replaces `.grad` of every parameter by the gradient of the global loss,
        None if no replica used the parameter. The next step may reuse its memory: clone what you
        keep. If float16 gradients overflowed, all are None and `is_skipped` of the result is True;
        such a step counts: its batch is consumed and the learning rate advances.

        Args:
            inputs, targets: tensors, NumPy arrays, or nests of them; `docs/how-to/own-loop.md`
                says what is cut into micro-batches. Needed by ranks with `needs_inputs` and
                `needs_targets`; None elsewhere.
            tell: called when this rank's part of the pipeline has run; returns at most 8 numbers (a
                wish to stop, a time). They travel with what ranks exchange anyway, and every rank
                gets the totals, least and greatest over all ranks: `result.told.greatest[0]`.
        """
        self._norms = None
        # As under no_grad: what a step does is not for the caller's inference mode to say.
        self.outer_step()
        with together(self.world, f"step {self.steps_done}"), torch.inference_mode(False):
            self._refuse_own_optimizer()
            with self._with_plan_of_memory():
                run = self._run("training", inputs, targets, self.loss_fn)
                digests = self._steps.same_data.says(self.steps_done, inputs, targets)
                run = replace(run, digests=digests) if digests else run
                with within_step():
                    result = self._steps.train(run, tell)
        self.steps_done += 1
        self._whole_model.watch()
        local_sgd = self._steps.local_sgd
        if local_sgd is not None:
            self._outer_due = local_sgd.steps.is_due(self.steps_done)
            self._versions_stepped = self._versions()
        return result

    def _refuse_own_optimizer(self) -> None:
        """Raise ConfigError where an optimizer of the user's own would find no gradients."""
        shard = self.request.combining.shard
        if self._steps.sharding is not None and not self._has_optimizer:
            raise ConfigError(
                f"outer.shard={shard}: expected an optimizer made by pipe.optimizer ahead of the "
                f"first step, got none; write optimizer = pipe.optimizer(lambda parameters: "
                f"torch.optim.AdamW(parameters)), or use outer.shard=none"
            )

    def evaluate(self, inputs: Nest = None, targets: Nest = None) -> StepResult:
        """Return the result of a global batch in evaluation mode: its `loss` is over all replicas.

        Every rank calls it, and gets the same `StepResult` as from `step`, without gradients:
        `loss`, `losses`, `metrics`, `weight`.
        """
        self._catch_up()
        with together(self.world, "evaluation"):
            run = self._run("evaluation", inputs, targets, self.loss_fn)
            with self._with_plan_of_memory():
                return self._steps.evaluate(run)

    def predict(self, inputs: Nest = None) -> Nest:
        """Return the model's outputs for this replica's inputs, in order, on each of its ranks.

        Every rank of the replica calls it. Tensors of the micro-batches are joined along the first
        dimension; None if there was no sample.
        """
        self._catch_up()
        with together(self.world, "prediction"):
            run = self._run("prediction", inputs, None, None)
            with self._with_plan_of_memory():
                return self._steps.predict(run, self._last_layer)

    def expect_memory(self, ranks: Sequence[RankForecast] | None) -> None:
        """Set the memory forecast of a pipeline's ranks, None if there is none.

        An out-of-memory error shows it next to what is allocated.
        """
        self._planned = None if ranks is None else ranks[self.stage_rank]

    @contextmanager
    def telling_of_memory(self, where: str) -> Iterator[None]:
        """Report to all ranks if memory runs out within the block; `where` names the activity.

        The DeviceMemoryError shows the plan next to what is allocated; see `expect_memory`.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, GpipeError) or not self.world.device.out_of_memory(error):
                raise
            self._refuse_exhausted(error, where)

    def _refuse_exhausted(self, error: Exception, where: str) -> NoReturn:
        layers = [layer for stage in self.stages.values() for layer in stage.layers.values()]
        told = (
            f"rank {self.world.rank}, stages {', '.join(map(str, self.stages))}, {where}: "
            f"{type(error).__name__}: {str(error).strip()}"
        )
        with together(self.world, where), self._with_plan_of_memory():
            raise OutOfMemoryError(told, MemorySnapshot.of(self.world.device, layers, 0)) from error

    @contextmanager
    def _with_plan_of_memory(self) -> Iterator[None]:
        """Put the plan beside what was allocated where an action finds no memory."""
        try:
            yield
        except OutOfMemoryError as error:
            told = explain_exhausted(error.standing, self._planned, self.request)
            raise DeviceMemoryError(f"{error}\n{told}") from error.__cause__

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip gradients by the norm over all stages; return that norm, the same on every rank.

        Every rank calls it, also one without parameters. Raises ConfigError for a negative
        `max_norm`, which would reverse the gradients.
        """
        if not max_norm >= 0:
            raise ConfigError(f"clip_grad_norm_: expected max_norm of 0 or more, got {max_norm}")
        with together(self.world, "clipping"):
            norms = self._gather_norms()
            own = {name: each.parameter for name, each in self._steps.owned_gradients().items()}
            return clip_by_norm(own, norms, max_norm)

    def grad_square(self) -> float:
        """Return the squared norm of this step's gradient before clipping, without tied parameters.

        Over all stages, the same on every rank. Every rank calls it, after `step`. After clipping
        it needs no communication.
        """
        with together(self.world, "adding up norms"):
            known = self._norms or self._gather_norms()
            return known.square_without(self._tied_names)

    def _gather_norms(self) -> Norms:
        """Return the norms of all gradients as they are now; the first ones of a step are kept."""
        owned, sharding = self._steps.owned_gradients(), self._steps.sharding
        in_parts = sharding is not None and sharding.shards_gradients
        # Of what is divided each rank counts its part, of all else the first that holds it.
        is_first = not (in_parts and self.replica)
        norms = gather_norms(
            {name: each.parameter for name, each in owned.items()},
            {
                info.name
                for info in self.all_parameters
                if (is_first and self._counts(info.stage))
                or (info.name in owned and owned[info.name].is_view)
            },
            [info.name for info in self.all_parameters],
            self.everybody if in_parts else self._site.pipeline,
            self.world.device,
            self._norm_dtype,
        )
        self._norms = self._norms or norms
        return norms

    def timeline(self) -> Timeline:
        """Return when the actions of the last step ran on each rank of this replica, in seconds.

        Every rank of the replica calls it. Times are on the clock of the replica's first rank;
        those of other hosts are accurate to the time of a message.
        """
        group = self._site.pipeline
        with together(self.world, "gathering a timeline"):
            group.all_reduce(torch.zeros(1))  # which all leave together
            met_s = time.perf_counter()
            events = self.last_step_moments().events(self.stage_rank)
            own = Recorded(clock_identity(), met_s, events)
            rows = on_one_clock(group.all_gather_object(own))
        table = self.schedule
        size = table.num_stages, table.num_microbatches
        return Timeline(rows, *size, table.name, table.skips)

    def last_step_moments(self) -> Moments:
        """Return when the actions of the last step ran on this rank, in seconds of its clock."""
        return self.last_step_marks().moments

    def last_step_times(self) -> StepTimes:
        """Return when this rank computed in the last step."""
        return self.last_step_marks().times

    def last_step_marks(self) -> StepMarks:
        """Return the last step's marks, for later: reading them waits for an accelerator."""
        return self._steps.recorder.step

    def describe(self) -> str:
        """Return the cut as a table: stage, rank, layers, parameters, share of the costs."""
        return self._cut_table

    def save(
        self,
        path: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[Any, Any] | None = None,
        *,
        step: int | None = None,
        keep: int | None = None,
    ) -> Path:
        """Write a checkpoint that any layout can load, complete or not at all; return its path.

        Every rank calls it, with the same path. Raises CheckpointError, and writes nothing, if
        `path` exists (without a step) or cannot be written, or if `extra` holds a value of another
        type.

        Args:
            path: the checkpoint; with a `step`, a folder of several.
            optimizer: saved with its state and the options of its groups.
            extra: a dict of plain values and NumPy arrays that `load` returns with the same types.
            step: write `path/step_<step>`, replacing one of that step. `gpipe_hpc.latest(path)`
                finds the newest.
            keep: with a step, how many of the newest checkpoints stay; None: all.
        """
        self._catch_up()
        if step is None:
            if keep is not None:
                raise ConfigError(
                    f"save: expected a step for keep={keep} to count by, got none; add "
                    f"step=pipe.steps_done"
                )
            with together(self.world, f"saving {path}"):
                return checkpoint.save(self, Path(path), optimizer, extra)
        with together(self.world, f"saving step {step} in {path}"):
            return checkpoint.save_numbered(
                Path(path),
                step,
                keep,
                self.everybody,
                leads=self.world.rank == self.everybody.ranks[0],
                save=lambda place: checkpoint.save(self, place, optimizer, extra),
            )

    def load(
        self,
        path: str | Path | checkpoint.Verified,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint of any layout, with the options of its groups; return its `extra`.

        Every rank calls it. Every byte is verified first, unless `checkpoint.verify` has done so.
        Raises CheckpointError, and changes nothing, if it is damaged or of another model, kind of
        optimizer or grouping.
        """
        source = Path(path) if isinstance(path, (str, Path)) else path
        where = source if isinstance(source, Path) else source.path
        with together(self.world, f"loading {where}"):
            extra = checkpoint.load(self, source, optimizer)
            self._whole_model.watch()
            return extra

    @property
    def loss_weight(self) -> float:
        """Return the global loss weight of the last step; the next backward starts near 1 / it."""
        return float(self._steps.weight)

    @property
    def loss_scale(self) -> LossScale | None:
        """Return the loss scale of float16, the same on every rank; None in other precisions."""
        return self._steps.loss_scale

    def outer_step(self) -> bool:
        """Average separately trained replicas if that is due; return whether it was done.

        Every rank calls it, after each `optimizer.step()`; otherwise the next `step`, `evaluate`,
        `predict` or `save` does it first. Does nothing if replicas sum gradients.
        """
        local_sgd = self._steps.local_sgd
        if local_sgd is None or not self._outer_due:
            return False
        self._outer_due = False
        with together(self.world, f"outer step {self.steps_done}"), torch.inference_mode(False):
            stepped = local_sgd.step(self.steps_done)
        if stepped:
            self.last_outer_step = self.steps_done
        return stepped

    def unite_replicas(self) -> bool:
        """Make separately trained replicas equal; return whether they were not.

        Every rank calls it, at the end of training, after the last `optimizer.step()`. Averages
        under way are applied, and each part of the model that was trained since its last outer step
        gets one more at once. Does nothing if replicas are equal already.
        """
        local_sgd = self._steps.local_sgd
        if local_sgd is None:
            return False
        self.outer_step()
        with together(self.world, "uniting the replicas"), torch.inference_mode(False):
            united = local_sgd.unite(self.steps_done)
        if united:
            self.last_outer_step = self.steps_done
        return united

    def _catch_up(self) -> None:
        """Do the outer step that was not called for, if the optimizer has stepped since."""
        if self._outer_due and self._versions() != self._versions_stepped:
            self.outer_step()

    def _versions(self) -> int:
        return sum(parameter._version for parameter in self.parameters())

    @property
    def uses_local_sgd(self) -> bool:
        """Return whether replicas train separately and are averaged at outer steps."""
        return self._own.tables.averaging is not None

    @property
    def replicas_differ(self) -> bool:
        """Return whether replicas may have different parameters."""
        local_sgd = self._steps.local_sgd
        return local_sgd is not None and local_sgd.steps.replicas_differ

    def outer_state(self) -> dict[str, torch.Tensor]:
        """Return what this rank keeps between steps for combining copies (residuals), by name."""
        return self._steps.outer_state()

    def outer_wanted(self, stored: Collection[str]) -> list[str]:
        """Return which tensors of a checkpoint `restore_outer` needs on this rank."""
        return self._steps.outer_wanted(stored)

    def restore_outer(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore `outer_state` from a checkpoint; what it lacks is reset."""
        self._steps.restore_outer(tensors)
        self._outer_due = False

    @property
    def outer_sent_bytes(self) -> int:
        """Return how many bytes this rank has sent so far to combine replicas.

        Compressed exchanges are counted as sent. A reduction of whole gradients by the backend
        counts as what a ring sends, 2 (n - 1) / n of its bytes; those of tied weights are left out.
        """
        return self._steps.outer_sent_bytes

    def restore_position(
        self, steps_done: int, loss_weight: float, loss_scale: Mapping[str, float] | None = None
    ) -> None:
        """Continue after `steps_done` steps, as a checkpoint says."""
        self.steps_done = steps_done
        self._steps.weight.fill_(loss_weight)
        if loss_scale is not None and self._steps.loss_scale is not None:
            self._steps.loss_scale.restore(loss_scale)

    def _counts(self, stage: int) -> bool:
        """Say whether this rank speaks for a stage: the first of those that hold a copy of it."""
        return self.schedule.placement.holders(stage)[0] == self.stage_rank

    def _run(self, lane: str, inputs: Nest, targets: Nest, loss_fn: LossFunction | None) -> Run:
        """Return what a run works on: this replica's share, cut into micro-batches."""
        held = [index for stage in self.stages.values() for index in stage.layers]
        keys = random_keys(self.seed, self.steps_done, self.microbatches, [*held, self.num_layers])
        if self.needs_inputs and inputs is None:
            raise DataError(
                f"rank {self.world.rank}: expected inputs, as it holds stage 0, got None; "
                f"pass this replica's share on ranks with pipe.needs_inputs"
            )
        uses_targets = self.needs_targets and targets is not None
        if lane == "training":
            for what, batch in (("inputs", inputs), ("targets", targets)):
                self._splitter.warn_of_gradients(batch, what)
        return Run(
            lane,
            keys,
            self.num_layers,
            self._pieces(inputs, "inputs") if self.needs_inputs else None,
            self._pieces(targets, "targets") if uses_targets else None,
            loss_fn,
            step=self.steps_done,
            is_cut=lane == "training" and self.num_global_microbatches > 1,
        )

    def _pieces(self, batch: Nest, what: str) -> Pieces:
        return self._splitter.split(with_tensors(batch, what), self.num_microbatches, what)


def _name_of(loss_fn: LossFunction | None) -> dict[str, object]:
    """Return the name of the loss, if this rank has one: ranks that need none may have none."""
    if loss_fn is None:
        return {}
    inner = getattr(loss_fn, "func", loss_fn)  # of a functools.partial
    return {"loss_fn": getattr(inner, "__qualname__", type(inner).__qualname__)}
