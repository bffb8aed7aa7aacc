"""Gradients of a stage: flat buckets where copies are summed over, tensors of their own if not."""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import nn

from gpipe_hpc.comm.device import Device
from gpipe_hpc.comm.group import Group, Pending
from gpipe_hpc.engine.outer.bucket import Bucket
from gpipe_hpc.engine.outer.sharded_bucket import ShardedBucket
from gpipe_hpc.engine.outer.stage_shards import StageShards
from gpipe_hpc.engine.outer.ways import Way
from gpipe_hpc.engine.sums.dividing import Divisor, packs
from gpipe_hpc.torch_compat import storage_use_count

_PACK: Final = 2**22  # elements of gradients, of which there are two copies at a time
# Who holds the memory of a tensor that no other shares: the tensor, and what asks.
_ALONE: Final = 2


class Unreduced:
    """The gradients of parameters of one dtype that no other rank adds to.

    None takes memory before the first backward has made it: a schedule that keeps all
    micro-batches holds the most just before that.
    """

    def __init__(self, parameters: list[nn.Parameter], device: Device) -> None:
        self.parameters = parameters
        self._is_accelerator = device.is_accelerator
        self._without: list[nn.Parameter] = []

    def clear(self) -> None:
        """Let go of the last step's gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        self._without = self.parameters

    def own(self) -> None:
        """Copy gradients that have just come and whose memory is not theirs alone.

        Autograd may take what a backward function returns as it is. Its memory may also be that of
        another parameter's gradient, or of one that is on its way to another stage: of a sum
        of two views both get the same. The next micro-batch adds in place.
        """
        come = [parameter for parameter in self._without if parameter.grad is not None]
        if not come:
            return
        self._without = [parameter for parameter in self._without if parameter.grad is None]
        dense = [p for p in come if p.grad is not None and not p.grad.is_sparse]
        shared = [p for p in dense if p.grad is not None and not _is_alone(p.grad)]
        # A pack at a time: of all at once the memory would hold every gradient twice.
        for pack in packs(shared, _PACK if self._is_accelerator else 1):
            _copy_gradients(pack)
        for parameter in come:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()  # as a bucket's are

    def used(self) -> list[bool]:
        """Say of each parameter whether a micro-batch has used it."""
        return [parameter.grad is not None for parameter in self.parameters]

    def late(self) -> list[nn.Parameter]:
        """Return nothing: nothing has left."""
        return []

    def start_reduction(self, way: Way | None) -> Pending | None:
        """Check that there is nothing to sum."""
        assert way is None, "the stage's gradients are summed over other ranks"
        return None

    def wait(self) -> None:
        """Return at once: nothing is summed."""

    def finish(self, divisor: Divisor, used: Sequence[bool]) -> None:
        """Divide the gradients."""
        pairs = zip(self.parameters, used, strict=True)
        divisor.divide([p.grad for p, is_used in pairs if is_used and p.grad is not None])


class StageGradients:
    """The gradients of one stage's trainable parameters, in buckets.

    `way`: how they are summed over the copies of the stage; None: it has no other. `buckets`: the
    names of the parameters of each bucket; without, one bucket for each dtype and device. `device`:
    where the stage computes.
    """

    def __init__(self, named_parameters: Mapping[str, nn.Parameter], device: Device) -> None:
        self._named, self._device = dict(named_parameters), device
        self._way: Way | None = None
        self._names: Sequence[Sequence[str]] = ()
        self._trained: list[bool] | None = None
        self._buckets: Sequence[list[Bucket] | list[Unreduced] | list[ShardedBucket]] = []
        self._late: list[Bucket] | list[Unreduced] = []
        self._shards: StageShards | None = None

    def sum_over(self, way: Way | None, names: Sequence[Sequence[str]] = ()) -> None:
        """Sum the gradients over other copies from now on, in buckets of these parameters."""
        self._way, self._names, self._trained = way, names, None

    def divide(self, shards: StageShards) -> None:
        """Leave to each copy its shard of the sums from now on."""
        self._shards, self._late = shards, []

    def adopt(self) -> None:
        """Make the buckets of what is trained now, on which all copies of the stage agree.

        Those that are divided over the copies stay.
        """
        trained = [p.requires_grad for p in self._named.values()]
        if self._shards is None and trained != self._trained:
            self._trained = trained
            self._buckets = [self._make(group) for group in self._groups()]
            self._late = []

    def clear(self) -> None:
        """Begin a step.

        A parameter that was frozen since `adopt` stays in its bucket, with a gradient of zeros; one
        that was unfrozen has one of its own, summed late.
        """
        if self._shards is not None:
            self._shards.begin()
            self._buckets = self._shards.buckets
        else:
            self._late = self._make(self._unfrozen())
        for parameter in self._named.values():
            if not parameter.requires_grad:
                parameter.grad = None
        for bucket in self.each():
            bucket.clear()

    def _unfrozen(self) -> dict[str, nn.Parameter]:
        """Return what is trained now and is in no bucket."""
        if self._trained is None:
            return self._named
        pairs = zip(self._named.items(), self._trained, strict=True)
        return {n: p for (n, p), was_trained in pairs if p.requires_grad and not was_trained}

    def _groups(self) -> list[dict[str, nn.Parameter]]:
        groups = [{name: self._named[name] for name in names} for names in self._names]
        return groups or [self._named]

    def _make(self, group: Mapping[str, nn.Parameter]) -> list[Bucket] | list[Unreduced]:
        kinds = _by_kind({name: p for name, p in group.items() if p.requires_grad})
        if self._way is None:
            return [Unreduced(list(kind.values()), self._device) for kind in kinds]
        return [Bucket(kind) for kind in kinds]

    def each(self) -> list[Bucket | Unreduced | ShardedBucket]:
        """Return all of this step's buckets, those of one number after the other."""
        return [bucket for buckets in (*self._buckets, self._late) for bucket in buckets]

    @property
    def num_buckets(self) -> int:
        """Return how many numbers of buckets there are; one may hold no trainable parameter."""
        return len(self._buckets)

    def parameters_of(self, number: int) -> list[nn.Parameter]:
        """Return the parameters of a bucket that are trained in this step."""
        held = (p for bucket in self._buckets[number] for p in bucket.parameters)
        return [parameter for parameter in held if parameter.requires_grad]

    def own(self) -> None:
        """Make gradients that a call of autograd has just made this stage's own."""
        for bucket in self.each():
            bucket.own()

    def start_reduction(self, number: int) -> list[Pending]:
        """Start the reduction of a bucket; its last contribution has come.

        Returns what is under way.
        """
        started = [bucket.start_reduction(self._way) for bucket in self._buckets[number]]
        return [pending for pending in started if pending is not None]

    def late(self, number: int) -> list[nn.Parameter]:
        """Return the parameters of a bucket whose gradients have changed since it left."""
        return [parameter for bucket in self._buckets[number] for parameter in bucket.late()]

    def take_in_late(self) -> list[nn.Parameter]:
        """Note which parameters that are summed late were used; return all that are summed late."""
        for bucket in self._late:
            if isinstance(bucket, Bucket):
                bucket.take_in()
        return [parameter for bucket in self._late for parameter in bucket.parameters]

    def start_late(self) -> None:
        """Start what had to wait until all copies had said that they have unfrozen the same."""
        for bucket in self._late:
            bucket.start_reduction(self._way)

    def used_flags(self) -> list[bool]:
        """Return which trainable parameters this replica used, bucket by bucket."""
        return [flag for bucket in self.each() for flag in bucket.used()]

    def trained_names(self) -> list[str]:
        """Return the names of the trainable parameters, in the order of `used_flags`."""
        names = {id(parameter): name for name, parameter in self._named.items()}
        return [names[id(p)] for bucket in self.each() for p in bucket.parameters]

    def wait(self) -> None:
        """Return when all sums are there."""
        for bucket in self.each():
            bucket.wait()

    def finish(self, divisor: Divisor, used: Sequence[bool]) -> None:
        """Finish every bucket; `used` is `used_flags` united over the replicas."""
        start = 0
        for bucket in self.each():
            stop = start + len(bucket.parameters)
            bucket.finish(divisor, used[start:stop])
            start = stop


def _by_kind(named: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    by_kind: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
    for name, parameter in named.items():
        by_kind.setdefault((parameter.dtype, parameter.device), {})[name] = parameter
    return list(by_kind.values())


def _is_alone(gradient: torch.Tensor) -> bool:
    """Say whether a tensor fills memory that torch has given to it and to no other.

    A copy for nothing costs more than its time: what malloc keeps of the many that are freed fits
    no other, so that on a CPU a stage's gradients would at times take their memory twice.
    """
    memory = gradient.untyped_storage()
    return (
        memory.nbytes() == gradient.nbytes
        and memory.resizable()  # else it is an array's, or another library's
        and storage_use_count(memory._cdata) == _ALONE
    )


def _copy_gradients(parameters: Sequence[torch.Tensor]) -> None:
    """Give parameters copies of their gradients, by one kernel."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    copies = [torch.empty_like(gradient) for gradient in gradients]
    torch._foreach_copy_(copies, gradients)
    for parameter, copy in zip(parameters, copies, strict=True):
        parameter.grad = copy


def unite_flags(flags: list[bool], group: Group) -> list[bool]:
    """Return flags that are set on any rank of the group. Host memory only: no device waits."""
    if group.size == 1 or not flags:
        return flags
    counts = torch.tensor(flags, dtype=torch.int32)
    group.all_reduce(counts)
    return [count > 0 for count in counts.tolist()]
