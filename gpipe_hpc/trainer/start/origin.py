"""The state from which a run starts: an in-memory checkpoint, a checkpoint on disk, or none."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from gpipe_hpc.checkpoint import Verified, read_facts
from gpipe_hpc.checkpoint.in_memory import CopySet, NeighbourCopies
from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.data import Identity
from gpipe_hpc.data.position import IDENTITY, check_data
from gpipe_hpc.errors import CheckpointError
from gpipe_hpc.optim.optimizer import own_options
from gpipe_hpc.pipeline import Pipeline
from gpipe_hpc.schedule import rows_text
from gpipe_hpc.settings import Config
from gpipe_hpc.small_files import Number, OrNull, Values, mismatch
from gpipe_hpc.trainer.horizon import last_step
from gpipe_hpc.trainer.run.changed_settings import SETTINGS
from gpipe_hpc.trainer.run.folder import OWNER, Checkpoints
from gpipe_hpc.trainer.run.identity import RunIdentity
from gpipe_hpc.trainer.run.resuming import newest_intact, newest_listed

log = logging.getLogger("gpipe_hpc.train")

MEMORY: Final = Path("in memory")
_EXTRA: Final = {
    "position": Number(0, is_whole=True),
    "corrupt": OrNull([str]),
    IDENTITY: OrNull({"settings": OrNull({})}),
    OWNER: OrNull(str),
    SETTINGS: OrNull({}),
    "adascale": OrNull(Values(Number(is_finite=False))),
}


class ResumedCheckpoint(NamedTuple):
    """A checkpoint to resume from, with the facts of its manifest.

    `verified` is None if its files have not been verified yet.
    """

    path: Path
    facts: Mapping[str, Any]
    verified: Verified | None = None

    @property
    def steps_done(self) -> int:
        """Return the step of the checkpoint."""
        return int(self.facts["steps_done"])

    @property
    def cut(self) -> dict[str, Any]:
        """Return the partition with which the checkpoint was saved."""
        cut: dict[str, Any] = self.facts["partition"]
        return cut

    @property
    def extra(self) -> dict[str, Any]:
        """Return the checkpoint's extra values, such as the data position."""
        extra: dict[str, Any] = self.facts["extra"]
        return extra


class StartState:
    """The state from which a run resumes: found on creation, restored by `take_over`. Collective.

    `in_memory` is the in-memory checkpoint, if it is at least as new as `resumed`, the checkpoint
    on disk; the latter is not verified then.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        run: RunIdentity,
        checkpoints: Checkpoints,
        copies: NeighbourCopies | None,
    ) -> None:
        self._config, self._world, self._run = config, world, run
        self._checkpoints, self._copies = checkpoints, copies
        with collective_errors(world, "opening the run"):
            self.in_memory: CopySet | None = None if copies is None else copies.find()
            self.resumed = self._found()
            if self.in_memory is not None and self.resumed is not None:
                is_newer = self.resumed.steps_done > self.in_memory.step
                self.in_memory = None if is_newer else self.in_memory

    @property
    def cut(self) -> Mapping[str, Any] | None:
        """Return the partition of the state from which the run resumes, if any."""
        if self.in_memory is not None:
            cut: Mapping[str, Any] = self.in_memory.about["partition"]
            return cut
        return None if self.resumed is None else self.resumed.cut

    def check_data(self, identity: Identity) -> None:
        """Raise CheckpointError on rank 0 if changed data is not allowed by checkpoint.data."""
        policy, resumed = self._config.checkpoint.data, self.resumed
        if self.in_memory is not None:
            check_data(MEMORY, self.in_memory.about["extra"], identity, policy)
        elif resumed is not None and last_step(self._config.train) > resumed.steps_done:
            check_data(resumed.path, resumed.extra, identity, policy)

    def move_aside(self) -> None:
        """Rename an earlier start's checkpoints past the step to resume from; call it on rank 0."""
        resumed, last = self.resumed, last_step(self._config.train)
        found = None if resumed is None else resumed.path
        done = 0 if resumed is None else resumed.steps_done
        if last <= done:
            return
        for path in self._checkpoints.set_aside(found):
            log.warning(
                "starting from step %d: a later checkpoint of an earlier start was moved to %s",
                done,
                path,
            )

    def take_over(
        self, pipe: Pipeline, optimizer: torch.optim.Optimizer, identity: Identity
    ) -> dict[str, Any] | None:
        """Restore pipeline and optimizer from memory or disk; return the checkpoint's extra values.

        Returns None if there is no state to resume from.
        """
        if self.in_memory is not None and self._copies is not None:
            extra = self._copies.restore(self.in_memory, pipe, optimizer)
            if extra is not None:
                log.info("resumed from copies in memory: %d steps done", pipe.steps_done)
                self._say_change(self.in_memory.about, pipe, extra, "copies in memory")
                return extra
            log.warning(
                "copies in memory do not fit the model; the newest intact checkpoint is used"
            )
            self._fall_back(identity)
        if self.resumed is None:
            return None
        with own_options(optimizer):
            extra = pipe.load(self.resumed.verified or self.resumed.path, optimizer)
        log.info("resumed from %s: %d steps done", self.resumed.path, pipe.steps_done)
        self._say_change(self.resumed.facts, pipe, extra, str(self.resumed.path))
        return extra

    def _say_change(
        self, before: Mapping[str, Any], pipe: Pipeline, extra: Mapping[str, Any], source: str
    ) -> None:
        if self._world.rank == 0:
            _log_change(before, pipe, int(extra["position"]), source)

    def _fall_back(self, identity: Identity) -> None:
        """Switch from the in-memory checkpoint to the newest intact one on disk."""
        with collective_errors(self._world, "opening the run"):
            self.in_memory = None
            self.resumed = self._found()
            if self._world.rank == 0:
                self.check_data(identity)
                self.move_aside()

    def _found(self) -> ResumedCheckpoint | None:
        """Return the newest intact checkpoint on disk, if any.

        If the in-memory checkpoint is at least as new, files are not read, and `verified` is None.
        """
        world, resume, is_repeated = (
            self._world,
            self._config.checkpoint.resume,
            self._run.is_repeated,
        )
        if self.in_memory is not None:
            leads = world.rank == 0
            listed = newest_listed(self._checkpoints, resume, is_repeated) if leads else None
            own = None if listed is None else ResumedCheckpoint(listed, read_facts(listed))
            resumed: ResumedCheckpoint | None = world.world_group.broadcast_object(own, root=0)
            if resumed is None or resumed.steps_done <= self.in_memory.step:
                return resumed

        def say(activity: str) -> None:
            world.activity = activity

        found = newest_intact(
            self._checkpoints, resume, is_repeated, world.world_group, world.rank, say
        )
        if found is None:
            return None
        wrong = mismatch(found.facts["extra"], _EXTRA, "extra")
        if wrong:
            raise CheckpointError(
                f"checkpoint {found.path}: not written by a run of gpipe_hpc.train: {wrong}; set "
                "checkpoint.resume to another, or load this one with pipe.load"
            )
        return ResumedCheckpoint(found.path, found.facts, found)


def _log_change(before: Mapping[str, Any], pipe: Pipeline, position: int, source: str) -> None:
    """Log changes of the layout since a state was saved, and warn if micro-batches change.

    Args:
        before: entries of the checkpoint's manifest, which an older version may lack.
        pipe: the pipeline.
        position: samples that the run has consumed.
        source: description of the checkpoint for the message.
    """
    mesh = pipe.mesh
    stages, replicas = before.get("stages"), before.get("replicas")
    if not isinstance(stages, int) or not isinstance(replicas, int):
        return
    ranks = before.get("ranks", stages * replicas)
    is_same = (ranks, stages, replicas) == (pipe.world.size, mesh.stages, mesh.replicas)
    if not is_same:
        log.info(
            "%s before, %s now: %s; resuming at step %d, after %s samples, with the state of %s",
            _ranks(ranks),
            pipe.world.size,
            _layout(pipe),
            pipe.steps_done,
            f"{position:,}",
            source,
        )
    if "microbatches" not in before:
        return
    was, now = before["microbatches"] * replicas, pipe.num_global_microbatches
    if was != now:
        log.warning(
            "each batch was cut into %d micro-batches and is now cut into %d: random numbers of "
            "layers and the batches of BatchNorm differ from those of the earlier start; to keep "
            "them, keep pipeline.replicas x pipeline.microbatches (x train.accumulation)",
            was,
            now,
        )


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"


def _layout(pipe: Pipeline) -> str:
    held = rows_text(pipe.schedule.placement)
    if held:
        return held[0].lower() + held[1:]
    count, stages = pipe.mesh.replicas, pipe.schedule.num_stages
    return (
        f"{stages} stage{'s' * (stages != 1)} on {_ranks(pipe.mesh.stages)}"
        f"{f', in {count} replicas' if count > 1 else ''}"
    )
