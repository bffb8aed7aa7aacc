"""Compressed all-reduce of gradients with error feedback.

Every replica keeps its compression error (residual) and adds it to its next gradient (Seide et al.,
2014; Karimireddy et al., 2019). `Compression` manages all stages of a rank; `CompressedReduction`
reduces the buckets of one stage in the background.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from gpipe_hpc.comm.collectives.collective_queue import CollectiveQueue
from gpipe_hpc.comm.collectives.group import CollectiveHandle, Group
from gpipe_hpc.comm.collectives.on_stream import StreamHandle
from gpipe_hpc.comm.collectives.sparse_group import SparseGroup
from gpipe_hpc.comm.collectives.thread_plans import StreamEnqueuer
from gpipe_hpc.data_parallel.compressors import (
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


class JobQueue:
    """Runs jobs in order in the background: on a thread for the CPU, on a stream for accelerators.

    Not tested on two GPUs.

    Args:
        name: Name of the thread.
        device: Where the tensors of the jobs are.
        ranks_are_threads: Jobs block until other ranks, which are threads of this process, arrive.
            A thread then launches the jobs on the stream.
    """

    def __init__(self, name: str, device: Device, *, ranks_are_threads: bool = False) -> None:
        self._device = device
        self._turns: CollectiveQueue | None = None
        self._launcher: StreamEnqueuer | None = None
        if not device.is_accelerator:
            self._turns = CollectiveQueue(name)
        else:
            self._stream = device.stream()
            self._launcher = StreamEnqueuer(name, device) if ranks_are_threads else None

    def start(self, job: Callable[[], None], uses: Sequence[Tensor]) -> CollectiveHandle:
        """Start a job after the earlier ones and, on a device, after the current stream's work.

        `uses`: the caller's tensors that the job reads or writes.
        """
        if self._turns is not None:
            # The job need not report the ranks that it waits for: its exchanges do.
            return self._turns.start(lambda note: job())
        if self._launcher is not None:
            return self._launcher.start(lambda: self._launch(job, uses))
        return self._launch(job, uses)

    def _launch(self, job: Callable[[], None], uses: Sequence[Tensor]) -> CollectiveHandle:
        self._stream.wait_stream(self._device.current_stream())
        with self._device.on(self._stream):
            job()
            done = self._stream.record_event()
        for tensor in uses:
            self._device.keep_for_stream(tensor, self._stream)
        return StreamHandle(done, self._device)

    def finish_on_thread(self) -> None:
        """Wait until the thread has run all jobs; return at once if jobs run on a stream."""
        if self._turns is not None:
            self.start(lambda: None, ()).wait()


class Residuals:
    """Compression errors by parameter; those of a bucket are in one flat buffer.

    If a parameter moves to another bucket, for example because others were frozen, its residual
    moves too.
    """

    def __init__(self) -> None:
        self._flats: dict[tuple[str, ...], tuple[Tensor, tuple[BucketItem, ...]]] = {}
        self._loose: dict[str, Tensor] = {}  # in no bucket so far

    def of(self, items: Sequence[BucketItem], like: Tensor) -> Tensor:
        """Return the residuals of a bucket: float64[n] if `like` is float64, else float32[n]."""
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
        """Return the residuals by parameter name, in the shapes of the parameters."""
        placed = {i.name: _part(flat, i) for flat, items in self._flats.values() for i in items}
        return {**self._loose, **placed}

    def restore(self, named: Mapping[str, Tensor]) -> None:
        """Replace all residuals."""
        self._flats.clear()
        self._loose = dict(named)


def _part(flat: Tensor, item: BucketItem) -> Tensor:
    return flat[item.start : item.stop].view(item.shape)


class CompressedReduction:
    """All-reduces the buckets of one stage with compression and error feedback.

    Residuals are stored in units of the gradient of the summed loss. The scale with which a
    backward pass starts, a power of two, may change between steps; residuals are multiplied and
    divided by it, which is exact. A parameter that this replica did not use in a step keeps its
    residual: if no replica used it, its gradient is None, and the sent residual would be lost.

    Args:
        compressor: Sums a bucket.
        group: The replicas.
        queue: Runs the reductions over `group` in the background, in one order for all stages that
            share the group.
        stage: Index of the stage, part of the random seed.
        seed: The seed of the run.
        may_skip: Steps may be skipped after an overflow; residuals are then restored.
    """

    def __init__(
        self,
        compressor: Compressor,
        group: Group,
        queue: JobQueue,
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
        """Begin a step whose backward pass starts with the scalar `unit`."""
        self._step, self._number, self._unit = step, 0, unit
        self._before.clear()
        self._kept_before = dict(self._compressor.state())

    def start(self, flat: Tensor, items: Sequence[BucketItem]) -> CollectiveHandle:
        """Start summing a bucket in place, with equal bits on all replicas (a `ReduceStrategy`)."""
        own = self._residuals.of(items, flat)
        if self._may_skip:
            self._before.append((own, own.clone()))
        words = (self._seed, self._step, self._group.position, self._stage, self._number)
        self._number += 1
        key = message_key(*words)
        unit = self._unit.to(device=flat.device, dtype=own.dtype)
        return self._queue.start(lambda: self._sum(flat, own, items, key, unit), (flat, own, unit))

    def _sum(
        self, flat: Tensor, own: Tensor, items: Sequence[BucketItem], key: int, unit: Tensor
    ) -> None:
        unused = [own[i.start : i.stop] for i in items if not i.is_used]
        kept = [(part, part.clone()) for part in unused]
        own.mul_(unit).add_(flat)
        for part, _ in kept:
            part.zero_()
        flat.copy_(self._compressor.sum(own, self._group, items, key))
        # Values that are not finite were sent; in a residual they would spoil all later steps.
        own.div_(unit).nan_to_num_(0.0, 0.0, 0.0)
        for part, before in kept:
            part.add_(before)

    def end(self, *, is_kept: bool) -> None:
        """End a step; if it is skipped, restore the residuals and the compressor's state."""
        if not is_kept:
            assert self._may_skip, "steps are skipped only if the loss is scaled"
            for own, before in self._before:
                own.copy_(before)
            self._compressor.restore(self._kept_before)
        self._before.clear()

    def state(self) -> dict[str, Tensor]:
        """Return this replica's residuals and the compressor's state, for a checkpoint."""
        own = self._own_copy
        residuals = {_residual_name(n, own): t for n, t in self._residuals.named().items()}
        return residuals | {_KEPT + n: t for n, t in self._compressor.state().items()}

    def wanted(self, stored: Collection[str], parameters: Collection[str]) -> list[str]:
        """Return the names of the tensors in a checkpoint that `restore` needs."""
        found = [_KEPT + name for name in parameters if _KEPT + name in stored]
        for name, copies in _residuals_in(stored).items():
            if name in parameters:
                wanted = [self._own_copy] if self._own_copy in copies else copies
                found += [_residual_name(name, copy) for copy in wanted]
        return found

    def restore(self, tensors: Mapping[str, Tensor], parameters: Collection[str]) -> None:
        """Restore residuals and the compressor's state from a checkpoint.

        If the number of replicas has changed, each takes an equal part of the sum of all residuals,
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
    def _own_copy(self) -> tuple[int, int]:
        return self._group.position, self._group.size


def _residual_name(parameter: str, copy: tuple[int, int]) -> str:
    """Return the name in a checkpoint of a parameter's residual on replica (number, of)."""
    return f"residual.{parameter}.{copy[0]}_of_{copy[1]}"


def _residuals_in(names: Iterable[str]) -> dict[str, list[tuple[int, int]]]:
    """Return the replicas (number, of) with a residual in a checkpoint, by parameter name."""
    found: dict[str, list[tuple[int, int]]] = {}
    for match in filter(None, map(_RESIDUAL.fullmatch, names)):
        found.setdefault(match[1], []).append((int(match[2]), int(match[3])))
    return {name: sorted(copies) for name, copies in found.items()}


class Compression:
    """Compressed all-reduce of all stages of a rank.

    Args:
        outer: The settings.
        seed: The seed of the run.
        may_skip: Steps may be skipped after an overflow.
    """

    def __init__(self, outer: Outer, seed: int, *, may_skip: bool) -> None:
        self._outer, self._seed, self._may_skip = outer, seed, may_skip
        self._reductions: list[tuple[CompressedReduction, frozenset[str]]] = []
        self._queues: dict[Group, JobQueue] = {}

    def reduction(
        self, index: int, gradients: GradientBuckets, copies: Group, *, is_wide: bool = False
    ) -> CompressedReduction:
        """Return the reduction of the buckets of a stage.

        Args:
            index: Index of the stage.
            gradients: Its parameters.
            copies: The replicas.
            is_wide: Gradients are summed in float32 or wider.

        Raises ModelError for a parameter whose dtype the compressor does not support.
        """
        for name, parameter in gradients.named.items():
            if parameter.requires_grad:
                least = torch.float32 if is_wide else parameter.dtype
                check_fits(self._outer.compress, name, torch.promote_types(parameter.dtype, least))
        if copies not in self._queues:
            self._queues[copies] = JobQueue(
                "compressed sums",
                gradients.device,
                ranks_are_threads=copies.torch_group is None,
            )
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
        """Wait until no reduction is running in a wide group.

        Call this before another collective: a wide group runs its collectives in the order in which
        they start, which must be the same on all ranks, but background jobs start theirs at any
        time.
        """
        if isinstance(copies, SparseGroup) and copies in self._queues:
            self._queues[copies].finish_on_thread()

    def begin(self, step: int, unit: Tensor) -> None:
        """Begin a step whose backward pass starts with `unit`."""
        for reduction, _ in self._reductions:
            reduction.begin(step, unit)

    def end(self, *, is_kept: bool) -> None:
        """End a step; a skipped step changes nothing."""
        for reduction, _ in self._reductions:
            reduction.end(is_kept=is_kept)

    @property
    def sent_bytes(self) -> int:
        """Return the number of bytes that this rank has sent so far."""
        return sum(group.sent.num_bytes for group in self._queues)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint."""
        return {
            name: t for reduction, _ in self._reductions for name, t in reduction.state().items()
        }

    def wanted(self, stored: Collection[str]) -> Iterator[str]:
        """Yield the names of the tensors in a checkpoint that `restore` needs."""
        for reduction, parameters in self._reductions:
            yield from reduction.wanted(stored, parameters)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state from a checkpoint; missing residuals start from zero."""
        for reduction, parameters in self._reductions:
            reduction.restore(tensors, parameters)
