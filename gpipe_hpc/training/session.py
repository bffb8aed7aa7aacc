"""From the settings to what the loop works with: data, pipeline, optimizer, resumed state."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from gpipe_hpc.checkpoint import BackgroundSaver, Verified, read_facts
from gpipe_hpc.comm.group import broadcast_object
from gpipe_hpc.comm.nests import Nest
from gpipe_hpc.comm.patience import patiently
from gpipe_hpc.comm.world import World, together
from gpipe_hpc.config import (
    Config,
    TokenDataConfig,
    TrainConfig,
    bind_loss,
    build_target,
    num_tokens_of,
)
from gpipe_hpc.engine.assembly import check_agreement
from gpipe_hpc.engine.loss import LossFunction
from gpipe_hpc.errors import ConfigError, ModelError
from gpipe_hpc.models import Layer, loss_function, normalise_layers, sees_ahead
from gpipe_hpc.pipeline import Pipeline
from gpipe_hpc.planning import Partition
from gpipe_hpc.planning.batchnorm import check_batchnorm
from gpipe_hpc.planning.gauges import MEASURED
from gpipe_hpc.planning.vocabulary import check_vocabulary
from gpipe_hpc.training.asking import request_of
from gpipe_hpc.training.batches import Batch, Batches
from gpipe_hpc.training.data import (
    BatchReader,
    CorruptTally,
    DataFacts,
    Dataset,
    DataSource,
    Identity,
    PlannedBatch,
    Request,
    ShuffledSampler,
    identify,
    open_data,
    tolerance,
    validation_batches,
)
from gpipe_hpc.training.foresight import Foresight, foresee
from gpipe_hpc.training.neighbour import Found, NeighbourCopies
from gpipe_hpc.training.optimizer import build_optimizer, own_options
from gpipe_hpc.training.position import IDENTITY, check_data, goes_on
from gpipe_hpc.training.run.changed_settings import SETTINGS, settings_of
from gpipe_hpc.training.run.folder import OWNER, Checkpoints
from gpipe_hpc.training.run.identity import Run
from gpipe_hpc.training.run.lock import RunLock
from gpipe_hpc.training.run.resuming import newest_listed, newest_whole

log = logging.getLogger("gpipe_hpc.train")

INDEX_FOLDER: Final = "index"
"""The folder of a run for indices of data that lie where nothing can be written."""

MEMORY: Final = Path("in memory")
_GRACE_S: Final = 5.0  # for a file that is being written when a run fails


class Resumed(NamedTuple):
    """A checkpoint to start from; `cut`: the partition it was saved with; `extra`: the run's.

    `verified`: None where nobody has looked whether it is whole.
    """

    path: Path
    steps_done: int
    cut: dict[str, Any]
    extra: dict[str, Any]
    verified: Verified | None = None

    @classmethod
    def of(
        cls, path: Path, facts: Mapping[str, Any], verified: Verified | None = None
    ) -> "Resumed":
        """Return what a checkpoint's manifest says."""
        return cls(path, facts["steps_done"], facts["partition"], facts["extra"], verified)


@dataclass
class Session:
    """Everything a run consists of, on one rank."""

    config: Config
    pipe: Pipeline
    optimizer: torch.optim.Optimizer
    source: DataSource | None  # None where this rank's stages need neither inputs nor targets
    facts: DataFacts
    identity: Identity
    sampler: ShuffledSampler
    checkpoints: Checkpoints
    run_folder: Path
    tally: CorruptTally
    run_name: str  # what its checkpoints say
    lock: RunLock | None  # of the run folder, on rank 0
    saver: BackgroundSaver
    copies: NeighbourCopies | None = None  # in memory, where the settings ask for them
    baseline: float | None = None  # on rank 0: the loss of guessing, where it is known
    foreseen: Foresight | None = None  # on rank 0, where the layers can be counted
    position: int = 0  # samples consumed since the start of the run
    _batches: Batches | None = None

    def next_batch(self) -> Batch:
        """Return this rank's part of the next global batch to train on; `position` stays."""
        if self._batches is None:
            num_left = max(0, last_step(self.config.train) - self.pipe.steps_done)
            plan = islice(self.sampler.batches(self.position), num_left)
            dataset = None if self.source is None else self.source.train
            self._batches = self._read(dataset, plan, "training samples")
        return next(self._batches)

    def validation_batches(self) -> Batches:
        """Return this rank's part of every global batch to validate on; close it after use."""
        train = self.config.train
        batches = validation_batches(
            self.facts.num_validation_samples, train.batch_size, train.validate_batches
        )
        plan = (PlannedBatch(indices, epoch=0, position=0) for indices in batches)
        dataset = None if self.source is None else self.source.validation
        return self._read(dataset, plan, "validation samples")

    def close(self) -> None:
        """End the threads that read ahead, or still write."""
        self.saver.give_up(_GRACE_S)
        if self._batches is not None:
            self._batches.close()

    def _read(self, dataset: Dataset | None, plan: Iterable[PlannedBatch], what: str) -> Batches:
        config = self.config
        return Batches(
            self.pipe, dataset, plan, config.data, self.tally, config.comm.timeout_s, what
        )

    def copy(self) -> float:
        """Copy this step's state into memory elsewhere; return how many seconds that took."""
        assert self.copies is not None, "the settings ask for no copies"
        return self.copies.save(self.pipe, self.optimizer, self._extra())

    def _extra(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "corrupt": self.tally.names,
            IDENTITY: self.identity,
            OWNER: self.run_name,
            SETTINGS: settings_of(self.config),
        }

    def save(self) -> float:
        """Write a checkpoint of this step; return how many seconds the step's edge took longer.

        One that is under way in the background is finished first.
        """
        began_s = time.perf_counter()
        self.finish_save()
        path = self.checkpoints.path(self.pipe.steps_done)
        self._check_lock()
        self.pipe.save(path, self.optimizer, self._extra())
        self._prune()
        seconds = time.perf_counter() - began_s
        log.info("saved %s: the step waited %.3f s", path, seconds)
        return seconds

    def start_save(self) -> float:
        """Begin to write a checkpoint of this step in the background; return the seconds waited.

        Waits for the one before, if that is under way.
        """
        began_s = time.perf_counter()
        self.finish_save()
        path = self.checkpoints.path(self.pipe.steps_done)
        self._check_lock()
        self.saver.start(path, self.optimizer, self._extra())
        return time.perf_counter() - began_s

    def finish_save(self) -> float:
        """Finish the checkpoint under way in the background, if any; return the seconds waited."""
        if not self.saver.is_under_way:
            return 0.0
        began_s = time.perf_counter()
        self._check_lock()
        path = self.saver.finish()
        self._prune()
        seconds = time.perf_counter() - began_s
        wrote_s = self.saver.seconds
        log.info(
            "saved %s, written in the background in %.3f s; at its end all waited %.3f s",
            path,
            wrote_s,
            seconds,
        )
        return seconds

    def _check_lock(self) -> None:
        with together(self.pipe.world, "saving"):
            if self.lock is not None:
                self.lock.check(looks=True)

    def _prune(self) -> None:
        with together(self.pipe.world, "removing old checkpoints"):
            if self.pipe.world.rank == 0:
                self.checkpoints.prune()


def open_session(
    config: Config,
    world: World,
    run: Run,
    lock: RunLock | None,
    copies: NeighbourCopies | None = None,
) -> Session:
    """Build the run on this rank and, where there is a checkpoint to resume, take it over.

    `lock`: of the run folder, on rank 0. `copies`: of the ranks' states in memory; what is found
    there goes before an older checkpoint.
    """
    everybody = world.everybody
    checkpoints = Checkpoints(run.folder, config.checkpoint.keep)
    with together(world, "opening the run"):
        in_memory = None if copies is None else copies.find()
        resumed = _resumed(config, world, checkpoints, run, in_memory)
        if in_memory is not None and resumed is not None and in_memory.step < resumed.steps_done:
            in_memory = None
    # Elsewhere only if needed: on a cluster, a thousand ranks would list the same folders.
    first = None
    if world.rank == 0:
        first = partial(_open_first, config, run.folder, resumed, in_memory)
    opened = patiently(world, "opening the data", first, idle_s=config.comm.timeout_s)
    source = None if opened is None else opened.source
    with together(world, "opening the run"):
        facts: DataFacts = broadcast_object(everybody, opened and opened.facts, root=0)
        identity: Identity = broadcast_object(everybody, opened and opened.identity, root=0)
        if world.rank == 0:
            _make_way(config, checkpoints, resumed)
        layers = build_target("model", config.model)
        loss_fn = loss_of(config, facts)
        sampler = ShuffledSampler(facts.num_samples, config.train.batch_size, config.train.seed)
        if isinstance(config.data, TokenDataConfig):
            model = normalise_layers(layers)
            check_vocabulary(model, num_tokens_of(config.data))
            _check_objective(model, config.data)
        _check_batchnorm(config, source, layers)
    example = _example(config, world, source, sampler)
    cut = _stored_cut(resumed, in_memory)
    pipe = _pipeline(config, world, layers, loss_fn, cut, example)
    look_ahead = None
    if source is not None and source.train.num_samples:
        look_ahead = partial(
            foresee, pipe, layers, loss_fn, partial(_microbatch, config, source, sampler)
        )
    foreseen = patiently(world, "counting the layers", look_ahead)
    optimizer = build_optimizer(pipe.named_parameters(), config.optimizer)
    is_needed = source is None and (pipe.needs_inputs or pipe.needs_targets)
    needed = partial(_open_later, config, run.folder) if is_needed else None
    own = patiently(world, "opening the data", needed, idle_s=config.comm.timeout_s) or (
        source,
        facts,
    )
    with together(world, "comparing the data"):
        source, seen = own
        check_agreement(everybody, {"data": seen.digests})
    tally = CorruptTally(tolerance(config.data))
    session = Session(
        config,
        pipe,
        optimizer,
        source,
        facts,
        identity,
        sampler,
        checkpoints,
        run.folder,
        tally,
        run.name,
        lock,
        BackgroundSaver(pipe),
        copies,
        None if opened is None else opened.baseline,
        foreseen,
    )
    extra = _take_over(pipe, optimizer, resumed, in_memory, copies)
    if extra is not None and goes_on(extra, identity, config.checkpoint.data):
        session.position = int(extra["position"])
        session.tally = CorruptTally(tally.limit, extra.get("corrupt", ()))
    if copies is not None:
        copies.forget_others()
    session.tally.add(facts.corrupt, says=world.rank == 0)
    return session


def loss_of(config: Config, facts: DataFacts) -> LossFunction:
    """Return the loss that the settings name, or else the one that fits the data."""
    if config.loss:
        return bind_loss(config.loss)
    if facts.loss is None:
        raise ConfigError(
            "config: no loss is known to fit these data, expected targets that are one tensor of "
            "numbers or classes, got others; name one, as loss._target_=my.module.loss_fn"
        )
    return loss_function(facts.loss)


def _take_over(
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer,
    resumed: Resumed | None,
    in_memory: Found | None,
    copies: NeighbourCopies | None,
) -> dict[str, Any] | None:
    """Fill pipeline and optimizer from memory or disk; return what was kept beside, if any."""
    if in_memory is not None and copies is not None:
        extra = copies.restore(in_memory, pipe, optimizer)
        if extra is not None:
            log.info("resumed from copies in memory: %d steps done", pipe.steps_done)
            return extra
        log.warning("copies in memory are of another cut, so the checkpoint is read")
    if resumed is None:
        return None
    with own_options(optimizer):
        extra = pipe.load(resumed.verified or resumed.path, optimizer)
    log.info("resumed from %s: %d steps done", resumed.path, pipe.steps_done)
    return extra


def _pipeline(
    config: Config,
    world: World,
    layers: Sequence[Layer],
    loss_fn: LossFunction,
    cut: Mapping[str, Any] | None,
    example: tuple[Nest, Nest] | None,
) -> Pipeline:
    request = replace(request_of(config), partition=_partition(config, cut))
    return Pipeline(layers, loss_fn, **vars(request), example=example, world=world)


def _resumed(
    config: Config,
    world: World,
    checkpoints: Checkpoints,
    run: Run,
    in_memory: Found | None,
) -> Resumed | None:
    """Return the checkpoint to start from, if any: the newest that is whole.

    Where there is as new a state in memory the files are not read, and `verified` is None.
    """
    everybody, resume = world.everybody, config.checkpoint.resume
    if in_memory is not None:
        listed = newest_listed(checkpoints, resume, run.is_repeated) if world.rank == 0 else None
        own = None if listed is None else Resumed.of(listed, read_facts(listed))
        resumed: Resumed | None = broadcast_object(everybody, own, root=0)
        if resumed is None or resumed.steps_done <= in_memory.step:
            return resumed

    def say(activity: str) -> None:
        world.activity = activity

    found = newest_whole(checkpoints, resume, run.is_repeated, everybody, world.rank, say)
    return None if found is None else Resumed.of(found.path, found.facts, found)


def _make_way(config: Config, checkpoints: Checkpoints, resumed: Resumed | None) -> None:
    """Put away what an earlier start saved past the step that this one trains from."""
    found = None if resumed is None else resumed.path
    done = 0 if resumed is None else resumed.steps_done
    if last_step(config.train) <= done:
        if found is not None and config.train.steps:
            log.warning(
                "nothing to train: %s has %d steps done, train.steps or train.stop_at asks for %d;"
                " raise it, or start over with checkpoint.resume=never",
                found,
                done,
                last_step(config.train),
            )
    else:
        for path in checkpoints.set_aside(found):
            log.warning("starting from step %d: what an earlier run saved is now %s", done, path)


class _Opened(NamedTuple):
    """The data as rank 0 has opened them."""

    source: DataSource
    facts: DataFacts
    identity: Identity
    baseline: float | None


def _open_first(
    config: Config, folder: Path, resumed: Resumed | None, in_memory: Found | None
) -> _Opened:
    """Open the data on rank 0; refuse to go on with others in silence."""
    source, facts = _open_later(config, folder)
    if source.about:
        log.info("data: %s", source.about)
    identity = _identity(config, source, resumed, in_memory)
    return _Opened(source, facts, identity, source.baseline())


def _open_later(config: Config, folder: Path) -> tuple[DataSource, DataFacts]:
    """Open the data, by the index that rank 0 has kept where the data are large."""
    source = open_data(config.data, config.train.seed, folder / INDEX_FOLDER)
    return source, DataFacts.of(source)


def _identity(
    config: Config, source: DataSource, resumed: Resumed | None, in_memory: Found | None
) -> Identity:
    """Return what the data are, on rank 0; refuse to go on with others in silence."""
    identity = identify(source, config.data, config.train)
    if in_memory is not None:
        check_data(MEMORY, in_memory.about["extra"], identity, config.checkpoint.data)
    elif resumed is not None and last_step(config.train) > resumed.steps_done:
        check_data(resumed.path, resumed.extra, identity, config.checkpoint.data)
    return identity


def last_step(train: TrainConfig) -> int:
    """Return the step after which the run ends."""
    return train.steps if train.stop_at is None else min(train.steps, train.stop_at)


def _stored_cut(resumed: Resumed | None, in_memory: Found | None) -> Mapping[str, Any] | None:
    """Return the partition of what the run goes on from."""
    if in_memory is not None:
        cut: Mapping[str, Any] = in_memory.about["partition"]
        return cut
    return None if resumed is None else resumed.cut


def _partition(config: Config, cut: Mapping[str, Any] | None) -> Any:
    """Return the cut asked for; a measured one is that of the checkpoint, if it fits."""
    policy = config.pipeline.partition
    if policy != "time" or cut is None:
        return policy
    stored = Partition.stored(cut)
    return stored if stored.measure == MEASURED else policy


def _example(
    config: Config, world: World, source: DataSource | None, sampler: ShuffledSampler
) -> tuple[Nest, Nest] | None:
    """Read one micro-batch to measure or count layers on; rank 0 alone does so."""
    is_needed = config.pipeline.partition == "time" or config.pipeline.recompute == "budget"
    if source is None or not is_needed:
        return None
    with together(world, "reading an example"):
        return _microbatch(config, source, sampler)


def _microbatch(config: Config, source: DataSource, sampler: ShuffledSampler) -> tuple[Nest, Nest]:
    """Read the first micro-batch of the run, which is as large as any."""
    indices, _ = sampler.batch(0)
    pieces = config.pipeline.replicas * config.pipeline.microbatches * config.train.accumulation
    return _read(config, source, indices[: max(1, -(-len(indices) // pieces))])


def _check_objective(layers: Sequence[Layer], data: TokenDataConfig) -> None:
    """Raise ConfigError where the model would be asked for tokens that it is given."""
    if data.objective == "next_token" and sees_ahead(layers):
        raise ConfigError(
            "config: bad data.objective, expected masked for a model whose positions see those "
            "behind them, got next_token: it would copy the token that it is to tell, and its loss "
            "fall to nothing; set data.objective=masked (BERT's training), or take a model that "
            "looks back alone, as gpt"
        )


def _check_batchnorm(config: Config, source: DataSource | None, layers: Sequence[Layer]) -> None:
    """Refuse, on rank 0, micro-batches that BatchNorm layers cannot normalise."""
    replicas = config.pipeline.replicas
    if source is None or not source.train.num_samples:
        return
    if config.pipeline.normalise_over_replicas and replicas > 1:
        return
    total, batch = source.train.num_samples, min(config.train.batch_size, source.train.num_samples)
    # The last batch of an epoch may be smaller, if the run comes that far.
    ends = last_step(config.train) * batch > total - total % batch
    smallest = total % batch if ends and total % batch else batch
    pieces = replicas * config.pipeline.microbatches * config.train.accumulation
    indices = list(range(max(1, smallest // pieces)))
    try:
        check_batchnorm(normalise_layers(layers), lambda: _read(config, source, indices)[0])
    except ModelError as error:
        raise ModelError(
            f"{error} (the smallest batch of the run has {smallest} samples)"
        ) from None


def _read(config: Config, source: DataSource, indices: list[int]) -> tuple[Nest, Nest]:
    if not indices:
        raise ConfigError("data: expected at least one sample to train on, got none")
    reader = BatchReader(source.train, True, True, tolerance(config.data))
    reading = reader.read(Request(indices, epoch=0))
    return reading.inputs, reading.targets
