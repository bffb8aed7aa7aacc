"""The training loop."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from operator import or_
from pathlib import Path
from typing import Final

import torch

from gpipe_hpc.checkpoint.in_memory import DEFAULT_FOLDER, NeighbourCopies, open_copies
from gpipe_hpc.comm.watchdog.torchrun_report import write_torchrun_error
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.comm.world.world import World, broadcast_errors, collective_errors
from gpipe_hpc.config import on_ranks, written
from gpipe_hpc.device.cores.bind import bound
from gpipe_hpc.device.deferred import Mark
from gpipe_hpc.engine import StepResult, StepTimes
from gpipe_hpc.errors import ConfigError, NonFiniteError
from gpipe_hpc.planner.memory.by_rank import memory_limits
from gpipe_hpc.planner.memory.shortage import shortage
from gpipe_hpc.planner.run_forecast import RunForecast
from gpipe_hpc.preflight.folder import await_run
from gpipe_hpc.preflight.rank_checks import check_before_run
from gpipe_hpc.preflight.settings import check_settings
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.figures.metrics import Metrics, open_metrics
from gpipe_hpc.trainer.figures.progress import Progress
from gpipe_hpc.trainer.figures.results import Results, StepLine
from gpipe_hpc.trainer.figures.straggling import StragglerDetector
from gpipe_hpc.trainer.figures.throughput import model_flops_per_s, share_of_peak, tokens_per_sample
from gpipe_hpc.trainer.figures.trackers import refuse_missing
from gpipe_hpc.trainer.horizon import last_step
from gpipe_hpc.trainer.logs import rank_log
from gpipe_hpc.trainer.one_step import TrainedStep, refuse_non_finite, train_one_step
from gpipe_hpc.trainer.run.folder import REQUEUE_FILE
from gpipe_hpc.trainer.run.identity import RunIdentity
from gpipe_hpc.trainer.run.launchers import own_launchers
from gpipe_hpc.trainer.run.lock import RunLock
from gpipe_hpc.trainer.run.opening import Refusal, begin, own_folder
from gpipe_hpc.trainer.run.restart_command import restart_command
from gpipe_hpc.trainer.session import Session
from gpipe_hpc.trainer.signals import (
    INTERRUPTED_EXIT_CODE,
    REQUEUE_EXIT_CODE,
    ProcessExit,
    StopRequest,
)
from gpipe_hpc.trainer.start import open_session
from gpipe_hpc.trainer.start.layout_choice import with_layout
from gpipe_hpc.trainer.start_world import settle_memory
from gpipe_hpc.trainer.step_boundary import (
    GlobalStepInfo,
    RankStepInfo,
    StepBoundary,
    TimedStep,
    agree,
    reports_late,
)
from gpipe_hpc.trainer.summary.compose import RunOutcome
from gpipe_hpc.trainer.summary.ledger import StepTimings
from gpipe_hpc.trainer.summary.reporting import Reporter
from gpipe_hpc.trainer.validation import validate
from gpipe_hpc.units import bytes_text
from gpipe_hpc.yaml_files import flat

log = logging.getLogger("gpipe_hpc.train")

REVIEW_AFTER: Final = 10
"""Number of steps after which the partition is compared with the measured times of layers."""


def run_training(
    config: Config,
    world: World,
    stop: StopRequest,
    doubts: Sequence[str] = (),
    words: Sequence[str] = (),
) -> int:
    """Train according to the settings; return the exit code of the process. Collective.

    The code is 0 if the run is finished or has reached train.stop_at, REQUEUE_EXIT_CODE if a signal
    requested an early stop. Raises GpipeError on every rank if one fails.

    Args:
        config: the settings.
        world: all ranks.
        stop: requests to stop.
        doubts: warnings about the settings, logged on rank 0.
        words: the command line's settings, for the command that restarts the run.
    """
    with ExitStack() as stack, broadcast_errors(world):
        with collective_errors(world, "comparing the settings"):
            check_settings(world, config)
        with collective_errors(world, "preparing the run folder"):
            launchers = world.world_group.merge_object(own_launchers(), or_)
            lock: RunLock | None = None
            begun: RunIdentity | Refusal | None = None
            if world.rank == 0:
                try:
                    refuse_missing(config.metrics.to)
                    lock = stack.enter_context(own_folder(config, stop, launchers))
                    begun = begin(config, lock, launchers)
                except (ConfigError, NonFiniteError) as error:
                    begun = Refusal.of(error)
            told: RunIdentity | Refusal = world.world_group.broadcast_object(begun, root=0)
            if isinstance(told, Refusal):
                raise told.error
            run = told
            if config.preflight.before_run:
                await_run(run, world.rank)
        if config.train.deterministic:
            # Before the first matmul, when cuBLAS fixes its workspace configuration.
            stack.enter_context(world.device.deterministic())
        # Before a search for a layout, which measures the speed of ranks.
        cores = stack.enter_context(bound(world, config.train.bind, config.train.num_threads))
        asked, chosen = config, with_layout(config, world, run, words)
        if chosen is not None:
            config, doubts = chosen.config, chosen.doubts
        pipeline = on_ranks(config, world.size).pipeline
        stages = world.size if pipeline.stages == "fit" else pipeline.stages
        replicas = 1 if pipeline.stages == "fit" else pipeline.num_replicas
        mesh = Mesh.fit(world.size, stages, replicas)
        stack.enter_context(rank_log(run.folder, world.rank, [mesh.stage_rank_of(world.rank)]))
        for doubt in [*doubts, *run.notes] if world.rank == 0 else ():
            log.warning(doubt)
        for line in cores if world.rank == 0 else ():
            log.info(line)
        if chosen is not None and world.rank == 0:
            log.info(chosen.said)
        copies = _copies(config, world, run)
        if copies is not None:
            stack.push(lambda kind, error, trace: _end_copies(copies, error))
        before_bytes = world.device.memory_allocated()
        opened = open_session(config, world, run, lock, copies, asked)
        session = stack.enter_context(closing(opened))
        settle_memory(world.device)
        if copies is not None:
            stack.enter_context(stop.before_exit(partial(_remove_copies, copies)))
        stack.enter_context(stop.between_steps(config.train.stop_grace_s, lambda: world.doing))
        place = None if copies is None else copies.place
        check_before_run(config, world, session.planned, place)
        return _Loop(session, stop, words, before_bytes).run()


def _copies(config: Config, world: World, run: RunIdentity) -> NeighbourCopies | None:
    """Open the in-memory checkpoints; return None if they are disabled or nothing is trained."""
    if not config.checkpoint.neighbour_every or not run.lineage:
        return None
    pipeline = config.pipeline
    layout = {
        "ranks": world.size,
        "stages": pipeline.stages,
        "replicas": pipeline.replicas,
        "schedule": pipeline.schedule,
        "shards": [config.outer.shard, config.outer.bucket_bytes],
    }
    about = {"lineage": run.lineage, "layout": layout}
    root = Path(config.checkpoint.neighbour_dir or DEFAULT_FOLDER)
    return open_copies(world, root, run.name, about, starts=dict(run.starts))


def _end_copies(copies: NeighbourCopies, error: BaseException | None) -> None:
    """Remove in-memory checkpoints, unless an error ended the run, as a restart may need them.

    After Ctrl-C the process may exit without calling this: see `_remove_copies`.
    """
    if error is None:
        copies.remove()


def _remove_copies(copies: NeighbourCopies, ending: ProcessExit) -> None:
    """Remove in-memory checkpoints before an immediate exit by Ctrl-C; else keep them."""
    if ending.code == INTERRUPTED_EXIT_CODE:
        copies.remove()


class _Loop:
    """The training loop of one rank: steps, checkpoints, validation and requests to stop."""

    def __init__(
        self,
        session: Session,
        stop: StopRequest,
        words: Sequence[str],
        memory_before_bytes: int,
    ) -> None:
        self._session = session
        self._pipe = session.pipe
        self._config = session.config
        self._stop, self._words = stop, words
        self._is_stopped = False  # equal on all ranks
        self._leads = session.pipe.world.rank == 0
        self._last = max(last_step(session.config.train), self._pipe.steps_done)
        self._validated = -1
        self._outer_sent_bytes = 0
        with collective_errors(session.pipe.world, "comparing the clocks of ranks"):
            self._edge = StepBoundary(session.pipe.world_group)
        self._is_late = reports_late(session.pipe.world.device)
        self._watched = StragglerDetector()
        self._known: TimedStep | None = None  # complete on the device, not yet reported
        self._reporter = Reporter(session, memory_before_bytes)

    def run(self) -> int:
        """Train from the session's current step to the last step; return the exit code."""
        pipe, first = self._pipe, self._pipe.steps_done
        with collective_errors(pipe.world, "opening the metrics"):
            metrics = self._open_metrics() if self._leads else None
        if metrics is None:
            with broadcast_errors(pipe.world):
                return self._steps(None, None)
        log.info("run folder %s", self._session.run_folder)
        log.info("stages:\n%s", pipe.describe())
        self._say_expectations()
        with (
            metrics,
            Progress(first, self._last, self._config.train.log_every) as progress,
        ):
            try:
                with broadcast_errors(pipe.world):
                    return self._steps(metrics, progress)
            except BaseException as error:
                if first < self._last:
                    self._reporter.fail(error)
                raise

    def _open_metrics(self) -> Metrics:
        first, config = self._pipe.steps_done, self._config
        return open_metrics(
            self._session.run_folder,
            first if first < self._last else None,
            self._pipe.world,
            to=config.metrics.to,
            settings=flat(written(config)),
        )

    def _steps(self, metrics: Metrics | None, progress: Progress | None) -> int:
        pipe, session = self._pipe, self._session
        first = saved = pipe.steps_done
        ledger, is_late = self._reporter.ledger, self._is_late
        results = Results(session, ledger, metrics, progress, is_late=is_late, rates=self._rates)
        since: Mark | None = None
        self._poll_stop()
        while pipe.steps_done < self._last and not self._is_stopped and not session.is_complete:
            trained, timed, agreed, times = self._step()
            done = pipe.steps_done
            self._note_whether_stopped(agreed.is_stopped)
            known = self._scalars(trained, agreed, times) if self._leads else {}
            self._known = results.add(StepLine(trained, timed, since, times, known))
            since = trained.laps.left
            if self._is_saved(done) or self._is_copied(done) or self._validates(done):
                # Check for NaN before the state of a step is saved.
                self._known = results.settle() or self._known
            if done - first == REVIEW_AFTER and not self._is_stopped:
                self._reporter.review()
                since = None
            if agreed.is_written:
                with self._stop.without_deadline():
                    stall_s = self._session.finish_save()
                self._say_stall(metrics, "checkpoint_end_stall_s", stall_s)
                since = None
            if self._is_saved(done) and not self._is_stopped:
                self._say_stall(metrics, "checkpoint_stall_s", self._save())
                saved, since = done, None
                self._poll_stop()
            if self._is_copied(done) and not self._is_stopped:
                self._say_stall(metrics, "neighbour_stall_s", self._session.copy())
                since = None
            if self._validates(done) and not self._is_stopped:
                self._validate(metrics, progress)
                self._reporter.refresh()
                since = None
        results.settle()
        pipe.log_pending()
        self._stop.accept()  # no step boundary follows
        if pipe.steps_done > first:
            if pipe.steps_done > saved:
                self._say_stall(metrics, "checkpoint_stall_s", self._session.save())
            else:
                self._say_stall(metrics, "checkpoint_end_stall_s", self._session.finish_save())
        self._say_corrupt()
        if not self._is_stopped and self._validated != pipe.steps_done:
            self._validate(metrics, progress)
        if progress is not None:
            progress.close()
        if self._is_stopped and self._leads:
            (self._session.run_folder / REQUEUE_FILE).write_text(f"{pipe.steps_done}\n")
        if pipe.steps_done > first:
            self._reporter.finish(RunOutcome("stopped" if self._is_stopped else "done"))
        elif first and not self._is_stopped:
            self._say_nothing_was_trained()
        return self._leave()

    def _poll_stop(self) -> bool:
        """Return whether any rank was asked to stop. Collective."""
        asked = torch.tensor([float(self._stop.is_requested)])
        with collective_errors(self._pipe.world, "asking whether to stop"):
            self._pipe.world_group.all_reduce(asked)
        self._note_whether_stopped(self._is_stopped or asked.item() > 0)
        return self._is_stopped

    def _note_whether_stopped(self, is_stopped: bool) -> None:
        self._is_stopped = is_stopped
        if is_stopped:
            self._stop.accept()

    def _scalars(
        self, trained: TrainedStep, agreed: GlobalStepInfo, times: StepTimings | None
    ) -> dict[str, float | None]:
        """Return a step's scalars for metrics.jsonl: times, memory, position and counters."""
        pipe, batch = self._pipe, trained.batch
        scalars: dict[str, float | None] = {
            **(StepTimings.none() if times is None else times.scalars()),
            "peak_memory_bytes": agreed.peak_memory_bytes,
            "peak_memory_rank": agreed.peak_memory_rank,
            "least_peak_memory_bytes": agreed.least_peak_memory_bytes,
            **{f"peak_memory_bytes/{r}": each for r, each in enumerate(agreed.peaks_bytes)},
            "position": self._session.position,
            "batch_size": batch.num_samples,
        }
        if agreed.straggles:
            scalars["straggling_rank"] = agreed.straggling_rank
            scalars["straggles"] = agreed.straggles
        if self._session.adascale is not None:
            scalars["gain"] = self._session.adascale.gain
            scalars["base_steps"] = self._session.adascale.progress
        outer = self._config.outer
        if getattr(outer, "every", 0) or pipe.outer_sent_bytes:
            scalars["outer_sent_bytes"] = pipe.outer_sent_bytes - self._outer_sent_bytes
            self._outer_sent_bytes = pipe.outer_sent_bytes
        if pipe.uses_local_sgd:
            scalars["outer_step"] = int(pipe.last_outer_step == pipe.steps_done)
        if self._session.tally.limit:
            scalars["corrupt_samples"] = self._session.tally.count
        if pipe.loss_scale is not None:
            scalars["loss_scale"] = trained.result.loss_scale
            scalars["skipped_steps"] = pipe.loss_scale.num_skipped
        return scalars

    def _rates(self, num_samples: int, seconds: float) -> dict[str, float]:
        """Return those of samples/s, tokens/s, model FLOP/s and share of peak that are known."""
        samples_per_s = num_samples / seconds
        tokens = tokens_per_sample(self._config.data)
        rates = {
            "samples_per_s": samples_per_s,
            "tokens_per_s": None if tokens is None else samples_per_s * tokens,
            "model_flops_per_s": model_flops_per_s(self._session, samples_per_s),
            "share_of_peak": share_of_peak(self._session, samples_per_s),
        }
        return {name: rate for name, rate in rates.items() if rate is not None}

    def _step(self) -> tuple[TrainedStep, TimedStep, GlobalStepInfo, StepTimings | None]:
        """Train one step; return its results, its time marks, facts about all ranks, and times.

        The facts are exchanged within the step's all-reduce. On an accelerator, which is still
        computing then, the times are those of the newest step known to be complete (None for the
        first), so that no rank waits for the device.
        """
        pipe, edge, before = self._pipe, self._edge, self._known
        origin_s, is_late = edge.origin_s, self._is_late

        def tell() -> tuple[float, ...]:
            if is_late:
                times = StepTimes(0.0) if before is None else before.marks.times
            else:
                times = pipe.last_step_times()
            return RankStepInfo(
                times,
                pipe.world.device.memory_peak(),
                wants_to_stop=self._stop.is_requested,
                # Whether this rank's part of a background checkpoint is written.
                has_written=self._session.saver.is_done,
                origin_s=origin_s if before is None or not is_late else before.origin_s,
                straggles=self._watched.factor,
            ).numbers()

        with self._reporter.layer_clock.step():
            trained = train_one_step(self._session, tell=tell)
        if not is_late:
            refuse_non_finite(self._session, trained)
        self._say_skipped(trained.result)
        with collective_errors(pipe.world, "the step boundary"):
            if self._session.lock is not None:
                self._session.lock.check()
        assert trained.result.rank_summary is not None, "every step exchanges rank summaries"
        agreed = agree(trained.result.rank_summary, pipe.world.size)
        edge.leave(trained.result.synced_at_s)
        this = TimedStep(pipe.steps_done, pipe.last_step_marks(), trained.laps, origin_s)
        timed = before if is_late else this
        if timed is None:
            return trained, this, agreed, None
        self._reporter.record_step(timed, agreed.pipeline_s)
        self._watch(timed, agreed)
        spent = timed.laps.spent(agreed.pipeline_s)
        times = StepTimings(agreed.pipeline_s, agreed.bubble, spent)
        return trained, this, agreed, times

    def _watch(self, timed: TimedStep, agreed: GlobalStepInfo) -> None:
        """Warn if this rank has become slower than the others, and again when it has recovered."""
        if timed.step == self._reporter.ledger.first_step + 1:
            return  # the first step includes one-time initialization
        busy_s, num_others = timed.marks.times.busy_s, self._pipe.world.size - 1
        if not num_others:
            return  # one rank cannot distinguish larger batches from a slower host
        others_s = max(0.0, agreed.busy_s - busy_s) / num_others
        found = self._watched.add(timed.step, busy_s, others_s)
        if found is None:
            return
        rank = self._pipe.world.rank
        if found.is_over:
            log.warning(
                "rank %d has computed at its normal speed again since step %d",
                rank,
                found.first_step,
            )
        else:
            log.warning(
                "straggler: rank %d has computed %.2f times as long as before since step %d, while "
                "the other ranks have not; check its host for other load, clock speed and "
                "temperature",
                rank,
                found.factor,
                found.first_step,
            )

    def _say_skipped(self, result: StepResult) -> None:
        pipe = self._pipe
        if result.is_skipped and self._leads and pipe.loss_scale is not None:
            log.warning(
                "step %d: skipped, as gradients overflowed float16 at a loss scale of %g; the "
                "scale is now %g",
                pipe.steps_done,
                result.loss_scale,
                pipe.loss_scale.value,
            )

    def _save(self) -> float:
        """Save a checkpoint, in the background if configured; return the seconds waited."""
        session = self._session
        with self._stop.without_deadline():
            return session.start_save() if self._config.checkpoint.in_background else session.save()

    def _say_stall(self, metrics: Metrics | None, name: str, seconds: float) -> None:
        """Record the seconds that all ranks waited at a step boundary for the state to be saved."""
        self._reporter.ledger.stall(name, seconds)
        if metrics is not None:
            metrics.write(self._pipe.steps_done, {name: seconds})

    def _is_saved(self, done: int) -> bool:
        every = self._config.checkpoint.every
        return every > 0 and done % every == 0 and done < self._last

    def _is_copied(self, done: int) -> bool:
        every = self._config.checkpoint.neighbour_every
        return every > 0 and done % every == 0 and done < self._last

    def _validates(self, done: int) -> bool:
        every = self._config.train.validate_every
        return every > 0 and done % every == 0 and done > 0

    def _validate(self, metrics: Metrics | None, progress: Progress | None) -> None:
        self._validated = self._pipe.steps_done
        found = validate(self._session, self._poll_stop)
        if found is None or metrics is None or progress is None:
            return
        self._reporter.ledger.validation_loss = found.loss
        scalars = {f"validation_{name}": value for name, value in found.metrics.items()}
        metrics.write(self._pipe.steps_done, {"validation_loss": found.loss} | scalars)
        words = "".join(f", {name} {value:.4f}" for name, value in found.metrics.items())
        progress.say(f"step {self._pipe.steps_done}: validation loss {found.loss:.4f}{words}")

    def _say_expectations(self) -> None:
        plan = self._reporter.planned
        if plan is not None:
            log.info(
                "expected from the measured layers: %.3f s in the pipeline a step, bubble %.1f %%"
                " (idle over total)",
                plan.timeline.makespan,
                100 * plan.timeline.bubble,
            )
            if self._session.config.plan.prices is not None:
                log.info("with plan.prices: %s", plan.text())
        foreseen = self._session.foreseen
        if foreseen is not None:
            fullest = max(foreseen.ranks, key=lambda rank: rank.total_bytes)
            log.info(
                "planned memory: %s on the fullest rank (stage rank %d), including %s of "
                "activations",
                bytes_text(fullest.total_bytes),
                foreseen.ranks.index(fullest),
                bytes_text(fullest.activation_bytes),
            )
            self._warn_of_memory(foreseen)
        baseline = self._session.baseline
        if baseline is not None:
            log.info("baseline loss, from token frequencies only: %.4f nats", baseline)

    def _say_nothing_was_trained(self) -> None:
        """Warn at the end of the run that no step was left to train."""
        train = self._config.train
        if self._leads and train.steps:
            adascale, done = self._session.adascale, self._pipe.steps_done
            worth = ""
            if adascale is not None:
                worth = f", equivalent to {adascale.progress:.0f} of the base batch"
            log.warning(
                "nothing to train: the run has already done %d steps%s, and train.steps or "
                "train.stop_at is %d; raise it, or start over with checkpoint.resume=never",
                done,
                worth,
                last_step(train),
            )

    def _warn_of_memory(self, foreseen: RunForecast) -> None:
        pipeline = self._config.pipeline
        limits = memory_limits(self._pipe.request)
        if limits is None:
            return
        own = self._pipe.request.kept_states.process_bytes
        lacking = shortage(
            [replace(rank, process_bytes=own) for rank in foreseen.ranks],
            limits,
            recompute=pipeline.recompute,
            schedule=pipeline.schedule,
            can_cut=self._session.batch_size > self._pipe.num_global_microbatches,
        )
        if lacking:
            log.warning("memory: %s; the run continues", lacking)

    def _say_corrupt(self) -> None:
        tally = self._session.tally
        if tally.count and self._leads:
            log.warning("skipped %d corrupt samples", tally.count)

    def _leave(self) -> int:
        if not self._is_stopped:
            return 0
        if self._leads:
            folder, done = self._session.run_folder, self._pipe.steps_done
            by = self._stop.signal.name if self._stop.signal else "a signal to another rank"
            text = (
                f"stopped by {by} after step {done}; to continue, start this run again:\n"
                f"    {restart_command(folder, self._words)}"
            )
            log.warning("%s", text)
            write_torchrun_error(text, is_cause=True)
        return REQUEUE_EXIT_CODE
