"""`Pipeline`: a model divided into stages on several ranks and trained as one model."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from gpipe_hpc import checkpoint
from gpipe_hpc.batches import share_of, unwrapped, with_tensors
from gpipe_hpc.comm.collectives.group import ControlGroup, Group
from gpipe_hpc.comm.world.groups import RankContext, check_agreement
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.comm.world.world import collective_errors
from gpipe_hpc.config import Keywords, by_keyword
from gpipe_hpc.data_parallel import (
    Factory,
    NoParameters,
    OptimizerSharding,
    OwnedParameter,
    make_optimizer,
)
from gpipe_hpc.device.cores.bind import bind
from gpipe_hpc.device.memory_snapshot import MemorySnapshot, OutOfMemoryError
from gpipe_hpc.engine import (
    ActionTimes,
    Engine,
    LossScale,
    Run,
    StepMarks,
    StepResult,
    StepTimes,
)
from gpipe_hpc.errors import ConfigError, DeviceMemoryError, GpipeError
from gpipe_hpc.models import (
    Layer,
    LossFunction,
    normalise_layers,
    parameter_sizes,
)
from gpipe_hpc.planner import (
    CostModel,
    CountedCosts,
    Example,
    MeasuredCosts,
    Request,
    check_conservation,
    cut_table,
)
from gpipe_hpc.planner.forecast import RankForecast
from gpipe_hpc.planner.memory.exhausted import explain_exhausted
from gpipe_hpc.planner.shared_decisions import decide_layout, with_open_choices
from gpipe_hpc.pytree import Nest
from gpipe_hpc.schedule import Timeline

log = logging.getLogger("gpipe_hpc.pipeline")

O = TypeVar("O", bound=torch.optim.Optimizer)


class Pipeline:
    """A sequential model, divided into stages on `stages` x `replicas` ranks.

    Every rank must construct it, with equal settings. It joins the existing process group, or
    starts one from the launcher's environment, or works in one plain process. Replicas whose
    initial weights differ are made equal to replica 0.

    Args:
        layers: nn.Sequential, or a sequence of modules and LayerSpecs. A rank builds only its own
            layers.
        loss_fn: function of (output, target) that returns the mean over the samples of a
            micro-batch, or a pair (sum, weight) such as (summed loss, number of tokens). A third
            value holds metrics. None if the pipeline only predicts.
        stages: number of ranks of one pipeline; default: world size / replicas.
        replicas: number of data-parallel pipelines.
        microbatches: number of micro-batches into which each replica splits its share of a batch.
        schedule: name of a schedule (``gpipe``, ``one_f_one_b``, ``zb_h1``, ...), or a Schedule.
        schedule_options: options of the schedule, by name.
        recompute: activations to recompute: ``always``, ``except_last``, ``never`` or ``budget``.
        memory_bytes: memory limit of a rank, used by ``recompute="budget"`` and
            ``schedule="auto"``.
        offload: whether activations are kept in host memory between forward and backward.
        partition: how layers are assigned to stages: ``parameters``, ``uniform``, ``time``,
            ``simulated``, or the number of layers of each stage.
        pins: layers on fixed stages, as {layer: stage}.
        paces: relative compute time of each rank of a pipeline, or ``measured``.
        precision: ``float32``, ``bfloat16`` or ``float16``, by autocast; weights stay float32.
        seed: seed of initial weights and dropout.
        build_on: ``cpu`` or ``device``: where layers are built and initialised.
        compile: whether layers are compiled with torch.compile, or the name of a backend.
        normalise_over_replicas: whether BatchNorm uses statistics over all replicas.
        buffers: how buffers of replicas are combined: ``average``, ``first`` or ``each``.
        outer: how replicas combine gradients: an Outer, or a dict of its fields.
        noise_over: ``microbatches`` or ``replicas``, to measure gradient noise for AdaScale.
        optimizer_states: number of optimizer states per parameter, for memory forecasts.
        example: (inputs, targets) of one micro-batch, if layers are to be measured; on rank 0.
        device: ``auto``, ``cpu``, ``cuda``, ...; with a number, all ranks share that device.
        timeout_s: seconds that a rank waits for another before all ranks stop.
        silence_s: seconds after which an unresponsive process counts as lost.
        stall_s: seconds without progress after which a rank is reported.
        bind: ``auto`` binds each rank to its own CPU cores.
        num_threads: number of CPU threads of a rank.
        world: the ranks to run on; default: the existing or a new process group.

    All arguments but the first two are keywords and have the meaning of the command line's
    settings; docs/reference/library.md has their defaults and details.

    Raises:
        ConfigError: an argument is invalid.
        ModelError: the model is not a sequence of layers, or a layer cannot be built.
        PartitionError: the layers do not fit the stages.
        ScheduleError: the schedule is invalid for these ranks and micro-batches.
        PeerError: another rank raised one of these.

    Example::

        pipe = Pipeline(layers, loss_fn, stages=4, replicas=2, microbatches=16)
        optimizer = torch.optim.AdamW(pipe.parameters())
        part = pipe.share(len(inputs))
        result = pipe.step(inputs[part], targets[part])
        optimizer.step()
    """

    @by_keyword(Keywords)
    def __init__(
        self, layers: nn.Sequential | Sequence[Layer], loss_fn: LossFunction, given: Keywords
    ) -> None:
        assert given.world is not None, "the world was joined before"
        self.world = given.world
        with collective_errors(self.world, "start"):
            request = given.request()
            model = normalise_layers(layers)
            facts = {"number of layers": len(model), **_name_of(loss_fn), **request.facts()}
            facts |= {"bind": given.bind, "num_threads": given.num_threads}
            check_agreement(self.world.world_group, facts)
            if given.bind != "none" or given.num_threads is not None:
                self._say(bind(self.world, given.bind, given.num_threads).lines)
            cost_model = self._cost_model(request, model, loss_fn, given.example)
        request = with_open_choices(request, self.world, cost_model, given.timeout_s)
        with collective_errors(self.world, "start"):
            request = request.on(self.world.size)
            assert not isinstance(request.stages, str), "the number of stages is known by now"
            self._planned: RankForecast | None = None
            self.mesh = Mesh.fit(self.world.size, request.stages, request.replicas)
            assert request.portions, "each replica has micro-batches"
            self._groups = RankContext.of(self.world, self.mesh)
        self.request = replace(request, stages=self.mesh.stages)
        self.loss_fn, self.num_layers = loss_fn, len(model)
        self.seed, self.precision, self.steps_done = request.seed, request.precision, 0
        self.layout = decide_layout(self.request, self._groups, cost_model, given.timeout_s)
        self.partition = self.layout.partition
        self._own = self.layout.of(self.replica)
        self.schedule = self._own.schedule
        with collective_errors(self.world, "start"):
            check_agreement(self.world_group, {"layout": self.layout.digest()})
            self._build(layers, model)

    def _say(self, lines: Iterable[str]) -> None:
        if self.world.rank == 0:
            for line in lines:
                log.info("%s", line)

    def _cost_model(
        self,
        request: Request,
        model: list[Layer],
        loss_fn: LossFunction,
        example: tuple[Nest, Nest] | None,
    ) -> CostModel:
        """Return the source of layer costs, which measures the layers if `example` is given."""
        given = None
        if example is not None:
            inputs, targets = (unwrapped(with_tensors(part, "example")) for part in example)
            given = Example(inputs, targets, loss_fn, request.seed, self.world.device)
        counted = CountedCosts(model, given, request.precision, shares_casts=not request.offload)
        return MeasuredCosts(counted)

    def _build(self, given: nn.Sequential | Sequence[Layer], model: list[Layer]) -> None:
        """Build this rank's stages and connect them to those of other ranks; a collective call."""
        request, own, placement = self.request, self._own, self.schedule.placement
        self._engine = Engine(
            given,
            model,
            self._groups,
            self.partition.counts,
            [self.layout.of(replica).schedule for replica in range(self.mesh.replicas)],
            own.tables,
            self.layout.portions,
            recomputed=own.recomputed,
            seed=self.seed,
            precision=self.precision,
            buffers=request.buffers,
            outer=request.combining,
            normalise_over_replicas=request.normalise_over_replicas,
            noise_over=request.noise_over,
            built_on_device=request.build_on == "device",
            compiles=request.compile,
        )
        self._steps, self.stages = self._engine.steps, self._engine.stages
        self.all_parameters, self.batchnorm = self._engine.all_parameters, self._engine.batchnorm
        self.needs_inputs, self.needs_targets = (
            self._engine.needs_inputs,
            self._engine.needs_targets,
        )
        self.num_parts = self._engine.num_parts
        check_conservation(parameter_sizes(model), self._engine.parameter_sizes())
        self._cut_table = cut_table(
            model,
            self.partition.counts,
            holders=[placement.holders(s) for s in range(placement.num_stages)],
            costs=self.partition.costs,
            measure=self.partition.measure,
            paces=self.partition.stage_paces,
            pins=self.partition.pins,
        )
        self._outer_due, self._versions_stepped = False, 0
        self.last_outer_step = 0
        self._has_optimizer = False

    @property
    def world_group(self) -> ControlGroup:
        """Return the group of all ranks."""
        return self._groups.world_group

    @property
    def dp_group(self) -> ControlGroup:
        """Return the group of the ranks at this stage rank in all replicas."""
        return self._groups.dp_group

    @property
    def replica(self) -> int:
        """Return the index of this rank's replica; world rank = replica x stages + stage_rank."""
        return self._groups.replica

    @property
    def stage_rank(self) -> int:
        """Return the position of this rank in its pipeline, from 0."""
        return self._groups.stage_rank

    @property
    def num_microbatches(self) -> int:
        """Return the number of micro-batches in a step of this replica."""
        return self.schedule.num_microbatches

    @property
    def microbatches(self) -> range:
        """Return the indices of this replica's micro-batches in the global batch."""
        return self.layout.portions.of(self.replica)

    @property
    def num_global_microbatches(self) -> int:
        """Return the number of micro-batches of the global batch."""
        return self.layout.portions.total

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters with global names (`layers.<index>.<name>`).

        Waits for parameters that other ranks have updated (`outer.shard`).
        """
        self.await_parameters()
        named = {n: p for s in self.stages.values() for n, p in s.named_parameters().items()}
        yield from named.items()

    def parameters(self) -> list[nn.Parameter]:
        """Return this rank's parameters; empty if its layers have none.

        `Pipeline.optimizer` accepts an empty list.
        """
        found = [parameter for _, parameter in self.named_parameters()]
        return found or NoParameters(self.world.device.torch)

    def optimizer(self, factory: Factory[O]) -> O:
        """Create an optimizer for this rank's parameters, sharded over replicas if configured.

        Every rank must call it. With ``outer.shard``, `factory` gets this rank's shards of the
        parameters (one-dimensional or whole), and the optimizer state is sharded over replicas and
        mirrored stages.

        Args:
            factory: function from a list of parameters to a torch.optim.Optimizer, with any groups
                and options.

        Raises:
            ConfigError: the optimizer cannot be sharded, or it uses several parameters together
                although a rank does not have all of them.
        """
        with collective_errors(self.world, "making the optimizer"):
            whole = dict(self.named_parameters())
            has_all = self.mesh.stages == 1
            optimizer = make_optimizer(factory, whole, self._steps.sharding, has_all=has_all)
            self._has_optimizer = True
            return optimizer

    @property
    def is_sharded(self) -> bool:
        """Return whether the optimizer state is sharded over the ranks that hold a stage."""
        return self._steps.sharding is not None

    def sharers(self, stage: int) -> Group:
        """Return the group that reduces the gradients of one of this rank's stages."""
        return self._steps.sharers(stage)

    def owned_parameters(self) -> dict[str, OwnedParameter]:
        """Return the parameters or shards that this rank's optimizer updates, by global name."""
        return self._steps.owned_parameters()

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the gradients of this rank's parameters by global name.

        Every rank must call it. Gradients are the `.grad` tensors, or gathered copies if gradients
        are sharded over replicas; None if no replica used the parameter.
        """
        with collective_errors(self.world, "gathering gradients"):
            return self._steps.gradients()

    def log_pending(self) -> None:
        """Log pending messages about previous steps, after waiting for the device.

        Which buffers differ between replicas is known only when the device has finished. These
        messages are logged with the next step, with a checkpoint, or by this call.
        """
        self._steps.log_pending()

    def await_parameters(self) -> None:
        """Wait for all parameters that other ranks are updating (`outer.shard`)."""
        sharding = self._steps.sharding
        if sharding is not None and sharding.is_gathering:
            self._await(sharding)

    def _await(self, sharding: OptimizerSharding) -> None:
        """Wait for the gathering of parameters that the optimizer step has started on all ranks."""
        with collective_errors(self.world, "gathering parameters"):
            sharding.wait()

    def share(self, num_samples: int) -> slice:
        """Return the slice of a global batch of `num_samples` that belongs to this replica."""
        own = self.microbatches
        return share_of(num_samples, self.num_global_microbatches, own.start, len(own))

    def step(
        self,
        inputs: Nest = None,
        targets: Nest = None,
        tell: Callable[[], Sequence[float]] | None = None,
    ) -> StepResult:
        """Run forward, backward and gradient reduction on this replica's share of a global batch.

        Every rank must call it. It sets `.grad` of each of this rank's parameters to the gradient
        of the loss over the global batch, replacing the previous one (no `zero_grad` is needed), or
        to None if no replica used the parameter. The next step may reuse the memory of gradients:
        clone those that you keep.

        Args:
            inputs: tensor, NumPy array, or nest of them, split into micro-batches along dimension
                0; `docs/how-to/own-loop.md` describes nests. Needed on ranks with `needs_inputs`,
                None elsewhere.
            targets: as `inputs`, passed to the loss function. Needed on ranks with `needs_targets`.
            tell: called when this rank has finished its part; returns at most 8 numbers (for
                example a request to stop, or a time). They are reduced together with the loss, and
                every rank gets sum, minimum and maximum over all ranks:
                `result.rank_summary.greatest[0]`.

        Returns:
            A StepResult, equal on all ranks: `loss`, `losses`, `metrics`, `weight`. If float16
            gradients overflowed, `is_skipped` is True and all gradients are None; such a step
            counts: its batch is consumed and the learning rate advances.
        """
        # The caller's inference mode must not affect a step.
        self.outer_step()
        with collective_errors(self.world, f"step {self.steps_done}"), torch.inference_mode(False):
            self._refuse_own_optimizer()
            with self._with_plan_of_memory():
                run = self._run("training", inputs, targets, self.loss_fn)
                result = self._engine.train(run, tell)
        self.steps_done += 1
        self._engine.whole_model.watch()
        local_sgd = self._steps.local_sgd
        if local_sgd is not None:
            self._outer_due = local_sgd.is_due(self.steps_done)
            self._versions_stepped = self._versions()
        return result

    def _refuse_own_optimizer(self) -> None:
        """Raise ConfigError if gradients are sharded but `Pipeline.optimizer` was not called."""
        shard = self.request.combining.shard
        if self._steps.sharding is not None and not self._has_optimizer:
            raise ConfigError(
                f"outer.shard={shard}: the optimizer must be created by pipe.optimizer before the "
                f"first step; write optimizer = pipe.optimizer(lambda parameters: "
                f"torch.optim.AdamW(parameters)), or use outer.shard=none"
            )

    def evaluate(self, inputs: Nest = None, targets: Nest = None) -> StepResult:
        """Run the forward of a global batch in evaluation mode and return its loss.

        Every rank must call it. Arguments are those of `step`. Returns a StepResult, equal on all
        ranks, with `loss`, `losses`, `metrics` and `weight` over all replicas; no gradients are
        computed.
        """
        self._catch_up()
        with collective_errors(self.world, "evaluation"):
            run = self._run("evaluation", inputs, targets, self.loss_fn)
            with self._with_plan_of_memory():
                return self._steps.evaluate(run)

    def predict(self, inputs: Nest = None) -> Nest:
        """Return the outputs of the model for this replica's inputs, in order of samples.

        Every rank of the replica must call it and gets the outputs. `inputs` is that of `step`.
        Output tensors of the micro-batches are concatenated along dimension 0; None if there are no
        samples.
        """
        self._catch_up()
        with collective_errors(self.world, "prediction"):
            run = self._run("prediction", inputs, None, None)
            with self._with_plan_of_memory():
                return self._engine.predict(run)

    def expect_memory(self, ranks: Sequence[RankForecast] | None) -> None:
        """Set the memory forecast of each rank of a pipeline; None if there is none.

        An out-of-memory error shows the forecast next to the allocated memory.
        """
        self._planned = None if ranks is None else ranks[self.stage_rank]

    @contextmanager
    def explain_memory_errors(self, where: str) -> Iterator[None]:
        """Context that reports an out-of-memory error to all ranks; `where` names the activity.

        Raises DeviceMemoryError, which shows the forecast (see `expect_memory`) next to the
        allocated memory.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, GpipeError) or not self.world.device.out_of_memory(error):
                raise
            self._refuse_exhausted(error, where)

    telling_of_memory = explain_memory_errors  # its former name, which scripts may use

    def _refuse_exhausted(self, error: Exception, where: str) -> NoReturn:
        layers = [layer for stage in self.stages.values() for layer in stage.layers.values()]
        explanation = (
            f"rank {self.world.rank}, stages {', '.join(map(str, self.stages))}, {where}: "
            f"{type(error).__name__}: {str(error).strip()}"
        )
        with collective_errors(self.world, where), self._with_plan_of_memory():
            raise OutOfMemoryError(
                explanation, MemorySnapshot.of(self.world.device, layers, 0)
            ) from error

    @contextmanager
    def _with_plan_of_memory(self) -> Iterator[None]:
        """Context that adds the memory forecast to an out-of-memory error of an action."""
        try:
            yield
        except OutOfMemoryError as error:
            explanation = explain_exhausted(error.snapshot, self._planned, self.request)
            raise DeviceMemoryError(f"{error}\n{explanation}") from error.__cause__

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip gradients by their total norm over all stages; return the norm before clipping.

        Every rank must call it, even without parameters. The norm is a 0-dim tensor, equal on all
        ranks.

        Raises:
            ConfigError: `max_norm` is negative or NaN.
        """
        if not max_norm >= 0:
            raise ConfigError(f"clip_grad_norm_: max_norm must be 0 or more, got {max_norm}")
        with collective_errors(self.world, "clipping"):
            return self._engine.clip_grad_norm(max_norm)

    def grad_square(self) -> float:
        """Return the squared gradient norm of this step before clipping, without tied parameters.

        Every rank must call it, after `step`. The norm is over all stages and equal on all ranks.
        After `clip_grad_norm_` it needs no communication.
        """
        with collective_errors(self.world, "adding up norms"):
            return self._engine.grad_square()

    def timeline(self) -> Timeline:
        """Return start and end of each action of the last step on all ranks of this replica.

        Every rank of the replica must call it. Times are in seconds on the clock of the replica's
        first rank; those of other hosts are accurate to the latency of a message.
        """
        with collective_errors(self.world, "gathering a timeline"):
            rows = self._engine.gather_events()
        table = self.schedule
        size = table.num_stages, table.num_microbatches
        return Timeline(rows, *size, table.name, table.skips)

    def last_step_moments(self) -> ActionTimes:
        """Return start and end of this rank's actions in the last step, in seconds of its clock."""
        return self.last_step_marks().moments

    def last_step_times(self) -> StepTimes:
        """Return the compute times of this rank in the last step."""
        return self.last_step_marks().times

    def last_step_marks(self) -> StepMarks:
        """Return the events recorded in the last step; reading their times waits for the device."""
        return self._steps.recorder.step

    def describe(self) -> str:
        """Return the partition as a text table: stage, rank, layers, parameters, costs."""
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
        """Write a checkpoint that can be loaded in any layout; return its path.

        Every rank must call it, with the same path. The checkpoint is written completely or not at
        all.

        Args:
            path: path of the checkpoint or, with `step`, of a folder of checkpoints.
            optimizer: optimizer to save, with its state and the options of its groups.
            extra: dict of plain values and NumPy arrays that `load` returns with the same types.
            step: write `path/step_<step>`, replacing an existing one; `gpipe_hpc.latest(path)`
                returns the newest.
            keep: with `step`, number of newest checkpoints to keep; None keeps all.

        Raises:
            CheckpointError: `path` exists (without `step`) or cannot be written, or `extra` has a
                value of an unsupported type. Nothing is written.
            ConfigError: `keep` is given without `step`.
        """
        self._catch_up()
        if step is None:
            if keep is not None:
                raise ConfigError(
                    f"save: keep={keep} needs a step, got none; add step=pipe.steps_done"
                )
            with collective_errors(self.world, f"saving {path}"):
                return checkpoint.save(self, Path(path), optimizer, extra)
        with collective_errors(self.world, f"saving step {step} in {path}"):
            return checkpoint.save_numbered(
                Path(path),
                step,
                keep,
                self.world_group,
                leads=self.world.rank == self.world_group.ranks[0],
                save=lambda place: checkpoint.save(self, place, optimizer, extra),
            )

    def load(
        self,
        path: str | Path | checkpoint.Verified,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint written in any layout; return its `extra`.

        Every rank must call it. The checkpoint is verified completely first, unless
        `checkpoint.verify` has done so.

        Args:
            path: path of the checkpoint, or the result of `checkpoint.verify`.
            optimizer: optimizer whose state and group options are restored.

        Raises:
            CheckpointError: the checkpoint is damaged, or belongs to another model, class of
                optimizer or division into groups. Nothing is changed.
        """
        source = Path(path) if isinstance(path, (str, Path)) else path
        where = source if isinstance(source, Path) else source.path
        with collective_errors(self.world, f"loading {where}"):
            extra = checkpoint.load(self, source, optimizer)
            self._engine.whole_model.watch()
            return extra

    @property
    def loss_weight(self) -> float:
        """Return the global loss weight of the last step.

        The backward of the next step starts near 1 / this weight.
        """
        return float(self._steps.weight)

    @property
    def loss_scale(self) -> LossScale | None:
        """Return the float16 loss scale, equal on all ranks, or None in other precisions."""
        return self._steps.loss_scale

    def outer_step(self) -> bool:
        """Average replicas that train separately (local SGD), if due; return whether that was done.

        Every rank must call it, after each `optimizer.step()`; otherwise the next `step`,
        `evaluate`, `predict` or `save` does it first. Does nothing if replicas reduce gradients in
        every step.
        """
        local_sgd = self._steps.local_sgd
        if local_sgd is None or not self._outer_due:
            return False
        self._outer_due = False
        with (
            collective_errors(self.world, f"outer step {self.steps_done}"),
            torch.inference_mode(False),
        ):
            stepped = local_sgd.step(self.steps_done)
        if stepped:
            self.last_outer_step = self.steps_done
        return stepped

    def unite_replicas(self) -> bool:
        """Make replicas that train separately (local SGD) equal; return whether they differed.

        Every rank must call it at the end of training, after the last `optimizer.step()`. Pending
        averages are applied, and parts of the model trained since their last outer step are
        averaged once more. Does nothing if replicas are equal.
        """
        local_sgd = self._steps.local_sgd
        if local_sgd is None:
            return False
        self.outer_step()
        with collective_errors(self.world, "uniting the replicas"), torch.inference_mode(False):
            united = local_sgd.unite(self.steps_done)
        if united:
            self.last_outer_step = self.steps_done
        return united

    def _catch_up(self) -> None:
        """Run an outer step that was not called explicitly, if the optimizer has stepped since."""
        if self._outer_due and self._versions() != self._versions_stepped:
            self.outer_step()

    def _versions(self) -> int:
        return sum(parameter._version for parameter in self.parameters())

    @property
    def uses_local_sgd(self) -> bool:
        """Return whether replicas train separately and are averaged in outer steps."""
        return self._own.tables.averaging is not None

    @property
    def replicas_differ(self) -> bool:
        """Return whether replicas may have different parameters."""
        local_sgd = self._steps.local_sgd
        return local_sgd is not None and local_sgd.replicas_differ

    def outer_state(self) -> dict[str, torch.Tensor]:
        """Return the state that this rank keeps between steps to combine replicas, by name.

        For example the residuals of compressed gradients.
        """
        return self._steps.outer_state()

    def outer_wanted(self, stored: Collection[str]) -> list[str]:
        """Return the names of checkpoint tensors that `restore_outer` needs on this rank."""
        return self._steps.outer_wanted(stored)

    def restore_outer(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore `outer_state` from a checkpoint; missing tensors are reset."""
        self._steps.restore_outer(tensors)
        self._outer_due = False

    @property
    def outer_sent_bytes(self) -> int:
        """Return the number of bytes that this rank has sent to combine replicas so far.

        Compressed exchanges count their compressed size. A backend reduction of whole gradients
        counts 2 (n - 1) / n of their bytes, as in a ring; reductions of tied weights are not
        counted.
        """
        return self._steps.outer_sent_bytes

    def restore_position(
        self, steps_done: int, loss_weight: float, loss_scale: Mapping[str, float] | None = None
    ) -> None:
        """Continue after `steps_done` steps, with the loss weight and scale of a checkpoint."""
        self.steps_done = steps_done
        self._steps.weight.fill_(loss_weight)
        if loss_scale is not None and self._steps.loss_scale is not None:
            self._steps.loss_scale.restore(loss_scale)

    def _run(self, lane: str, inputs: Nest, targets: Nest, loss_fn: LossFunction | None) -> Run:
        """Split this replica's share of a batch into micro-batches, for one run of a schedule."""
        return self._engine.prepare(lane, self.steps_done, inputs, targets, loss_fn)


def _name_of(loss_fn: LossFunction | None) -> dict[str, object]:
    """Return the name of the loss function, to compare between ranks; empty if there is none."""
    if loss_fn is None:
        return {}
    inner = getattr(loss_fn, "func", loss_fn)  # of a functools.partial
    return {"loss_fn": getattr(inner, "__qualname__", type(inner).__qualname__)}
