"""The training loop."""

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from gpipe_hpc.comm.group import broadcast_object
from gpipe_hpc.comm.mesh import Mesh
from gpipe_hpc.comm.world import World, together
from gpipe_hpc.config import Config
from gpipe_hpc.training.logs import rank_log
from gpipe_hpc.training.metrics import Metrics, open_metrics
from gpipe_hpc.training.neighbour import DEFAULT_FOLDER, NeighbourCopies, open_copies
from gpipe_hpc.training.one_step import Trained, refuse_non_finite, train_one_step
from gpipe_hpc.training.peak import peak_memory_bytes, used_memory_bytes
from gpipe_hpc.training.progress import Progress
from gpipe_hpc.training.run.folder import REQUEUE_FILE
from gpipe_hpc.training.run.identity import Run
from gpipe_hpc.training.run.opening import begin, lock_folder
from gpipe_hpc.training.session import Session, last_step, open_session
from gpipe_hpc.training.signals import REQUEUE_EXIT_CODE, StopRequest
from gpipe_hpc.training.step_edge import Agreed, StepEdge, Told
from gpipe_hpc.training.summary.compose import Ended
from gpipe_hpc.training.summary.reporting import Reporter
from gpipe_hpc.training.throughput import tokens_per_sample
from gpipe_hpc.training.validation import validate

log = logging.getLogger("gpipe_hpc.train")


def run_training(
    config: Config, world: World, stop: StopRequest, doubts: Sequence[str] = ()
) -> int:
    """Train as the settings say; return the exit code of the process.

    `doubts` about the settings are logged as warnings, on rank 0.

    0 when the run is finished or reached train.stop_at, REQUEUE_EXIT_CODE when a signal asked
    it to stop early. Raises GpipeError on every rank if one fails.
    """
    with ExitStack() as stack:
        with together(world, "preparing the run folder"):
            lock = stack.enter_context(lock_folder(config)) if world.rank == 0 else None
            begun = None if lock is None else begin(config, lock)
            run: Run = broadcast_object(world.everybody, begun, root=0)
        if config.train.num_threads is not None:
            torch.set_num_threads(config.train.num_threads)
        mesh = Mesh.fit(world.size, config.pipeline.stages, config.pipeline.replicas)
        stack.enter_context(rank_log(run.folder, world.rank, [mesh.stage_rank_of(world.rank)]))
        for doubt in [*doubts, *run.notes] if world.rank == 0 else ():
            log.warning(doubt)
        copies = _copies(config, world, run)
        if copies is not None:
            stop.at_last = copies.remove
            stack.push(lambda kind, error, trace: _end_copies(copies, stop, error))
        before_bytes = used_memory_bytes(world.device)
        opened = open_session(config, world, run, lock, copies)
        session = stack.enter_context(closing(opened))
        return _Loop(session, stop, before_bytes).run()


def _copies(config: Config, world: World, run: Run) -> NeighbourCopies | None:
    """Open the copies in memory that the settings ask for; a run that trains nothing has none."""
    if not config.checkpoint.neighbour_every or not run.lineage:
        return None
    pipeline = config.pipeline
    about = {
        "lineage": run.lineage,
        "ranks": world.size,
        "stages": pipeline.stages,
        "replicas": pipeline.replicas,
        "schedule": pipeline.schedule,
    }
    root = Path(config.checkpoint.neighbour_dir or DEFAULT_FOLDER)
    return open_copies(world, root, run.name, about)


def _end_copies(copies: NeighbourCopies, stop: StopRequest, error: BaseException | None) -> None:
    """Remove copies in memory, unless a failure ended the run: then a restart may need them."""
    stop.at_last = None
    if error is None or "KeyboardInterrupt" in f"{type(error).__name__} {error}":
        copies.remove()


class _Loop:
    """One run over its steps, on one rank."""

    def __init__(self, session: Session, stop: StopRequest, memory_before_bytes: int) -> None:
        self._session = session
        self._pipe = session.pipe
        self._config = session.config
        self._stop = stop
        self._leads = session.pipe.world.rank == 0
        self._last = max(last_step(session.config.train), self._pipe.steps_done)
        self._validated = -1
        with together(session.pipe.world, "the first step's edge"):
            self._edge = StepEdge(session.pipe.everybody)
        self._reporter = Reporter(session, memory_before_bytes)

    def run(self) -> int:
        """Train from where the session stands to the last step."""
        pipe, first = self._pipe, self._pipe.steps_done
        if not self._leads:
            return self._steps(None, None)
        log.info("run folder %s", self._session.run_folder)
        log.info("stages:\n%s", pipe.describe())
        self._say_expectations()
        resumed = first if first < self._last else None
        with (
            open_metrics(self._session.run_folder, resumed) as metrics,
            Progress(first, self._last, self._config.train.log_every) as progress,
        ):
            try:
                return self._steps(metrics, progress)
            except BaseException as error:
                if first < self._last:
                    self._reporter.fail(error)
                raise

    def _steps(self, metrics: Metrics | None, progress: Progress | None) -> int:
        pipe, every = self._pipe, self._config.checkpoint.every
        stopped = False
        first = pipe.steps_done
        while pipe.steps_done < self._last and not stopped:
            began_s = time.perf_counter()
            trained = self._step()
            done = pipe.steps_done
            agreed = self._meet()
            stopped = agreed.is_stopped
            if metrics is not None and progress is not None:
                step_time_s = time.perf_counter() - began_s
                scalars = self._scalars(trained, agreed, step_time_s)
                metrics.write(done, scalars)
                progress.update(done, scalars)
                ledger = self._reporter.ledger
                ledger.note(agreed, step_time_s, trained.batch.num_samples, trained.result.loss)
            if agreed.is_written:
                self._say_stall(metrics, "checkpoint_stall_s", self._session.finish_save())
            if every and done % every == 0 and done < self._last and not stopped:
                self._say_stall(metrics, "checkpoint_stall_s", self._save())
            if self._is_copied(done) and not stopped:
                self._say_stall(metrics, "neighbour_stall_s", self._session.copy())
            if self._validates(done):
                self._validate(metrics, progress)
                self._reporter.refresh()
        if pipe.steps_done > first:
            self._say_stall(metrics, "checkpoint_stall_s", self._session.save())
        self._say_corrupt()
        if not stopped and self._validated != pipe.steps_done:
            self._validate(metrics, progress)
        if progress is not None:
            progress.close()
        code = self._leave(stopped)
        if pipe.steps_done > first:
            self._reporter.finish(Ended("stopped" if stopped else "done"))
        return code

    def _scalars(
        self, trained: Trained, agreed: Agreed, step_time_s: float
    ) -> dict[str, float | None]:
        """Return what a line of metrics.jsonl says of a step."""
        pipe, (batch, result, lr, norm) = self._pipe, trained
        scalars = {
            "loss": result.loss,
            "lr": lr,
            "grad_norm": norm,
            "step_time_s": step_time_s,
            "samples_per_s": batch.num_samples / step_time_s,
            **self._tokens_per_s(batch.num_samples / step_time_s),
            "bubble": agreed.bubble,
            "pipeline_s": agreed.pipeline_s,
            "peak_memory_bytes": agreed.peak_memory_bytes,
            "peak_memory_rank": agreed.peak_memory_rank,
            "position": self._session.position,
        }
        if self._session.tally.limit:
            scalars["corrupt_samples"] = self._session.tally.count
        if pipe.loss_scale is not None:
            scalars["loss_scale"] = result.loss_scale
            scalars["skipped_steps"] = pipe.loss_scale.num_skipped
        if len(result.losses) > 1:
            scalars |= {f"losses/{name}": value for name, value in result.losses.items()}
        return scalars | {f"metrics/{name}": value for name, value in result.metrics.items()}

    def _tokens_per_s(self, samples_per_s: float) -> dict[str, float]:
        tokens = tokens_per_sample(self._config.data)
        return {} if tokens is None else {"tokens_per_s": samples_per_s * tokens}

    def _step(self) -> Trained:
        trained = train_one_step(self._session)
        refuse_non_finite(self._session, trained)
        pipe, result = self._pipe, trained.result
        if result.is_skipped and self._leads and pipe.loss_scale is not None:
            log.warning(
                "step %d: skipped, as gradients overflowed float16 at a loss scale of %g; it is "
                "%g now",
                pipe.steps_done,
                result.loss_scale,
                pipe.loss_scale.value,
            )
        return trained

    def _meet(self) -> Agreed:
        """Put together what ranks know of the step."""
        pipe = self._pipe
        told = Told(
            pipe.last_step_times(),
            peak_memory_bytes(pipe.world.device),
            wants_to_stop=self._stop.came,
            # A checkpoint in the background: each rank's part is in its file.
            has_written=self._session.saver.is_done,
        )
        origin_s = self._edge.origin_s
        with together(pipe.world, "the step's edge"):
            if self._session.lock is not None:
                self._session.lock.check()
            agreed = self._edge.meet(told, pipe.world.rank)
        self._reporter.hold(agreed, origin_s)
        return agreed

    def _save(self) -> float:
        """Save in mid-run, as the settings say; return the seconds that the next step waits."""
        session = self._session
        is_behind = self._config.checkpoint.in_background
        return session.start_save() if is_behind else session.save()

    def _say_stall(self, metrics: Metrics | None, name: str, seconds: float) -> None:
        """Note how long all waited at a step's edge for its state to be kept."""
        self._reporter.ledger.stall(name, seconds)
        if metrics is not None:
            metrics.write(self._pipe.steps_done, {name: seconds})

    def _is_copied(self, done: int) -> bool:
        every = self._config.checkpoint.neighbour_every
        return every > 0 and done % every == 0 and done < self._last

    def _validates(self, done: int) -> bool:
        every = self._config.train.validate_every
        return every > 0 and done % every == 0 and done > 0

    def _validate(self, metrics: Metrics | None, progress: Progress | None) -> None:
        self._validated = self._pipe.steps_done
        found = validate(self._session)
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
                plan.makespan,
                100 * plan.bubble,
            )
        baseline = self._session.baseline
        if baseline is not None:
            log.info("loss of always guessing from frequencies: %.4f nats", baseline)

    def _say_corrupt(self) -> None:
        tally = self._session.tally
        if tally.count and self._leads:
            log.warning("%d corrupt samples were found and passed over", tally.count)

    def _leave(self, stopped: bool) -> int:
        if not stopped:
            return 0
        if self._leads:
            mark = self._session.run_folder / REQUEUE_FILE
            mark.write_text(f"{self._pipe.steps_done}\n")
            log.warning(
                "stopped by a signal after step %d: start this run again to go on",
                self._pipe.steps_done,
            )
        return REQUEUE_EXIT_CODE
