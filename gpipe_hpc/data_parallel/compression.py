"""Compressed sums over the copies of a stage, with error feedback.

Every copy keeps what its message lost, the compression error or residual, and adds it to its next
gradient (Seide et al., 2014; Karimireddy et al., 2019). `Compression` does so for all stages of a
rank; `CompressedReduction` for the buckets of one, in the background while the rank computes.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from gpipe_hpc.comm.collectives.group import Group, Pending
from gpipe_hpc.comm.collectives.on_stream import OnStream
from gpipe_hpc.comm.collectives.thread_plans import PutByThread
from gpipe_hpc.comm.collectives.turns import Turn, Turns
from gpipe_hpc.comm.collectives.wide import WideGroup
from gpipe_hpc.comm.watchdog.noting import unheard
from gpipe_hpc.data_parallel.compressors import (
    CompressionTask,
    Compressor,
    check_fits,
    make_compressor,
)
from gpipe_hpc.data_parallel.layout import BucketItem
from gpipe_hpc.data_parallel.reducer import GradientBuckets
from gpipe_hpc.device.device import Device
from gpipe_hpc.models import message_key
from gpipe_hpc.settings import Outer

_RESIDUAL: Final = re.compile(r"residual\.(.*)\.(\d+)_of_(\d+)")
_KEPT: Final = "compressor."


class ThreadQueue:
    """Carries out jobs on tensors of the host one after the other, on a thread."""

    def __init__(self, name: str) -> None:
        self._turns = Turns(name)

    def start(self, job: Callable[[], None], uses: Sequence[Tensor]) -> Pending:
        """Start a job after those before it; `uses`: the caller's tensors that it uses."""
        return _ThreadJob(self._turns.start(lambda note: job()))


class _ThreadJob:
    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def when_done(self, call: Callable[[], None]) -> None:
        self._turn.calls.add(call)

    def wait(self) -> None:
        self._turn.wait(unheard)  # the exchanges of the job report for whom they wait


class StreamQueue:
    """Carries out jobs on tensors of an accelerator on a stream. Not tested on two GPUs."""

    def __init__(self, device: Device) -> None:
        self._stream, self._device = device.stream(), device

    def start(self, job: Callable[[], None], uses: Sequence[Tensor]) -> Pending:
        """Launch a job after what the current stream has to do so far."""
        self._stream.wait_stream(self._device.current_stream())
        with self._device.on(self._stream):
            job()
            done = self._stream.record_event()
        for tensor in uses:
            self._device.lend(tensor, self._stream)
        return OnStream(done, self._device)


class ThreadedStreamQueue:
    """A `StreamQueue` that a thread fills, as jobs wait for ranks that are threads too."""

    def __init__(self, name: str, device: Device) -> None:
        self._queue, self._put = StreamQueue(device), PutByThread(name, device)

    def start(self, job: Callable[[], None], uses: Sequence[Tensor]) -> Pending:
        """Start a job after those before it, and after what the current stream has to do."""
        return self._put.start(lambda: self._queue.start(job, uses))


Queue = ThreadQueue | StreamQueue | ThreadedStreamQueue


def make_queue(name: str, device: Device, group: Group) -> Queue:
    """Return what carries out, on a device, jobs that send within a group."""
    if not device.is_accelerator:
        return ThreadQueue(name)
    is_of_threads = group.torch_group is None
    return ThreadedStreamQueue(name, device) if is_of_threads else StreamQueue(device)


class Residuals:
    """The compression errors of parameters, those of a bucket in one flat buffer.

    Parameters may change their bucket, as when others are frozen; their residuals move along.
    """

    def __init__(self) -> None:
        self._flats: dict[tuple[str, ...], tuple[Tensor, tuple[BucketItem, ...]]] = {}
        self._loose: dict[str, Tensor] = {}  # in no bucket so far

    def of(self, items: Sequence[BucketItem], like: Tensor) -> Tensor:
        """Return the residuals of a bucket, float64[n] if `like` is, else float32[n]."""
        names = tuple(item.name for item in items)
        if names in self._flats:
            return self._flats[names][0]
        for other in [each for each in self._flats if not set(each).isdisjoint(names)]:
            flat, moved = self._flats.pop(other)
            self._loose |= {item.name: _part(flat, item).clone() for item in moved}
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        flat = torch.zeros(like.numel(), dtype=wide, device=like.device)
        for item in items:
            if item.name in self._loose:
                _part(flat, item).copy_(self._loose.pop(item.name))
        self._flats[names] = flat, tuple(items)
        return flat

    def named(self) -> dict[str, Tensor]:
        """Return the residual of each parameter that has one, in its shape."""
        placed = {i.name: _part(flat, i) for flat, items in self._flats.values() for i in items}
        return {**self._loose, **placed}

    def restore(self, named: Mapping[str, Tensor]) -> None:
        """Replace all residuals by these."""
        self._flats.clear()
        self._loose = dict(named)


def _part(flat: Tensor, item: BucketItem) -> Tensor:
    return flat[item.start : item.stop].view(item.shape)


class _Copy(NamedTuple):
    """One of the copies of a stage."""

    number: int
    of: int


class CompressedReduction:
    """Sums the buckets of one stage over its copies; each copy adds what it lost before.

    Residuals are kept in units of the gradient of the summed loss: what a backward starts from, a
    power of two, may change from step to step, so they are multiplied and divided by it, which
    changes no bit. A parameter that this replica did not use in a step keeps its residual: if no
    replica used it, its gradient is None, and what was sent would be lost.

    Args:
        compressor: What sums a bucket.
        group: The copies.
        queue: What carries out the sums over `group` in the background, in one order for all stages
            that share the group.
        stage: Index of the stage, part of the key of random numbers.
        seed: The seed of the run.
        may_skip: Steps may be skipped for an overflow; residuals are then restored.
    """

    def __init__(
        self,
        compressor: Compressor,
        group: Group,
        queue: Queue,
        *,
        stage: int,
        seed: int,
        may_skip: bool,
    ) -> None:
        self._compressor, self._group, self._queue = compressor, group, queue
        self._stage, self._seed, self._may_skip = stage, seed, may_skip
        self._residuals = Residuals()
        self._step, self._number = 0, 0
        self._unit = torch.ones(())
        self._before: list[tuple[Tensor, Tensor]] = []
        self._kept_before: dict[str, Tensor] = {}

    def begin(self, step: int, unit: Tensor) -> None:
        """Begin a step whose backward starts from `unit`, a scalar."""
        self._step, self._number, self._unit = step, 0, unit
        self._before.clear()
        self._kept_before = dict(self._compressor.state())

    def start(self, flat: Tensor, items: Sequence[BucketItem]) -> Pending:
        """Start summing in place, as a `ReduceStrategy`; all copies get the same bits."""
        own = self._residuals.of(items, flat)
        if self._may_skip:
            self._before.append((own, own.clone()))
        words = (self._seed, self._step, self._group.position, self._stage, self._number)
        self._number += 1
        task = CompressionTask(self._group, tuple(items), message_key(*words))
        unit = self._unit.to(device=flat.device, dtype=own.dtype)
        return self._queue.start(lambda: self._sum(flat, own, task, unit), (flat, own, unit))

    def _sum(self, flat: Tensor, own: Tensor, task: CompressionTask, unit: Tensor) -> None:
        kept = [
            (part, part.clone())
            for part in (own[i.start : i.stop] for i in task.items if not i.is_used)
        ]
        own.mul_(unit).add_(flat)
        for part, _ in kept:
            part.zero_()
        flat.copy_(self._compressor.sum(own, task))
        # What is not finite was sent; kept, it would spoil every later step.
        own.div_(unit).nan_to_num_(0.0, 0.0, 0.0)
        for part, before in kept:
            part.add_(before)

    def end(self, *, is_kept: bool) -> None:
        """End a step; one that is not kept changes nothing."""
        if not is_kept:
            assert self._may_skip, "steps are skipped only if the loss is scaled"
            for own, before in self._before:
                own.copy_(before)
            self._compressor.restore(self._kept_before)
        self._before.clear()

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps: residuals by copy, and the compressor's state."""
        own = self._own_copy
        residuals = {_residual_name(n, own): t for n, t in self._residuals.named().items()}
        return residuals | {_KEPT + n: t for n, t in self._compressor.state().items()}

    def wanted(self, stored: Collection[str], parameters: Collection[str]) -> list[str]:
        """Return which tensors of a checkpoint `restore` needs for these parameters."""
        found = [_KEPT + name for name in parameters if _KEPT + name in stored]
        for name, copies in _residuals_in(stored).items():
            if name in parameters:
                wanted = [self._own_copy] if self._own_copy in copies else copies
                found += [_residual_name(name, copy) for copy in wanted]
        return found

    def restore(self, tensors: Mapping[str, Tensor], parameters: Collection[str]) -> None:
        """Continue with what a checkpoint kept.

        If it is of another number of copies, each takes an equal part of the sum of all residuals,
        so that nothing is lost.
        """
        named = {}
        for name, copies in _residuals_in(tensors).items():
            if name not in parameters:
                continue
            if self._own_copy in copies:
                named[name] = tensors[_residual_name(name, self._own_copy)]
            else:
                parts = [tensors[_residual_name(name, copy)] for copy in copies]
                named[name] = torch.stack(parts).sum(0) / self._group.size
        self._residuals.restore(named)
        kept = {n.removeprefix(_KEPT): t for n, t in tensors.items() if n.startswith(_KEPT)}
        self._compressor.restore({n: t for n, t in kept.items() if n in parameters})

    @property
    def _own_copy(self) -> _Copy:
        return _Copy(self._group.position, self._group.size)


def _residual_name(parameter: str, copy: _Copy) -> str:
    """Return the name under which a checkpoint keeps a copy's residual of a parameter."""
    return f"residual.{parameter}.{copy.number}_of_{copy.of}"


def _residuals_in(names: Iterable[str]) -> dict[str, list[_Copy]]:
    """Return the copies whose residuals are among the names of a checkpoint, by parameter."""
    found: dict[str, list[_Copy]] = {}
    for match in filter(None, map(_RESIDUAL.fullmatch, names)):
        found.setdefault(match[1], []).append(_Copy(int(match[2]), int(match[3])))
    return {name: sorted(copies) for name, copies in found.items()}


class Compression:
    """Makes the compressed reductions of a rank's stages and leads them through its steps.

    Args:
        outer: The settings.
        seed: The seed of the run.
        may_skip: Steps may be skipped for an overflow.
    """

    def __init__(self, outer: Outer, seed: int, *, may_skip: bool) -> None:
        self._outer, self._seed, self._may_skip = outer, seed, may_skip
        self._reductions: list[tuple[CompressedReduction, frozenset[str]]] = []
        self._queues: dict[Group, Queue] = {}

    def reduction(
        self, index: int, gradients: GradientBuckets, copies: Group, *, is_wide: bool = False
    ) -> CompressedReduction:
        """Return how a stage's buckets are summed.

        Args:
            index: Index of the stage.
            gradients: Its parameters.
            copies: The ranks that hold them.
            is_wide: What is summed is in float32 at least.

        Raises ModelError for a parameter of a dtype that the compressor does not support.
        """
        for name, parameter in gradients.named.items():
            if parameter.requires_grad:
                least = torch.float32 if is_wide else parameter.dtype
                check_fits(self._outer.compress, name, torch.promote_types(parameter.dtype, least))
        if copies not in self._queues:
            self._queues[copies] = make_queue("compressed sums", gradients.device, copies)
        reduction = CompressedReduction(
            make_compressor(self._outer),
            copies,
            self._queues[copies],
            stage=index,
            seed=self._seed,
            may_skip=self._may_skip,
        )
        self._reductions.append((reduction, frozenset(gradients.named)))
        return reduction

    def wait_until_idle(self, copies: Group) -> None:
        """Wait until no sum of a group is under way, before another collective of a wide group.

        A wide group carries out its collectives in one order, which has to be the same on all
        ranks: a sum that a job starts, and one that the caller starts meanwhile, have no order.
        """
        queue = self._queues.get(copies)
        if isinstance(copies, WideGroup) and isinstance(queue, ThreadQueue):
            queue.start(lambda: None, ()).wait()

    def begin(self, step: int, unit: Tensor) -> None:
        """Begin a step whose backward starts from `unit`."""
        for reduction, _ in self._reductions:
            reduction.begin(step, unit)

    def end(self, *, is_kept: bool) -> None:
        """End a step; one that is not kept changes nothing."""
        for reduction, _ in self._reductions:
            reduction.end(is_kept=is_kept)

    @property
    def sent_bytes(self) -> int:
        """Return how much this rank has sent so far."""
        return sum(group.sent.num_bytes for group in self._queues)

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps."""
        return {
            name: t for reduction, _ in self._reductions for name, t in reduction.state().items()
        }

    def wanted(self, stored: Collection[str]) -> Iterator[str]:
        """Yield which tensors of a checkpoint `restore` needs."""
        for reduction, parameters in self._reductions:
            yield from reduction.wanted(stored, parameters)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue with what a checkpoint kept; what it lacks starts from zero."""
        for reduction, parameters in self._reductions:
            reduction.restore(tensors, parameters)
