"""All-reduce the gradients of sets of parameters as soon as they are complete.

`GradientBuckets` are the gradients of one set: parameters with the same replicas, such as those of
a stage. `GradientReducer` starts the reductions of all sets of a rank in one order, if possible
during the last backward pass, like DDP's Reducer.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gpipe_hpc.comm.collectives.group import CollectiveHandle, Group
from gpipe_hpc.data_parallel.buckets import (
    Bucket,
    Divisor,
    LocalGradients,
    ReduceStrategy,
    ShardedBucket,
    by_kind,
)
from gpipe_hpc.data_parallel.layout import OwnedParameter
from gpipe_hpc.device.device import Device
from gpipe_hpc.errors import ConfigError, ModelError


class ParameterShards:
    """Parameters of a set in buckets that are sharded over replicas and all-gathered after updates.

    A parameter that is frozen now is in no shard and must stay frozen. A bucket without trained
    parameters keeps its number and has no shards.

    Args:
        named: The parameters by global name.
        buckets: The names in each bucket.
        layers: Index of the layer that uses each parameter.
        group: The replicas.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        buckets: Sequence[Sequence[str]],
        layers: Mapping[str, int],
        group: Group,
    ) -> None:
        self._frozen = {name: p for name, p in named.items() if not p.requires_grad}
        self.buckets = [
            [
                ShardedBucket(kind, group)
                for kind in by_kind({n: named[n] for n in names if n not in self._frozen})
            ]
            for names in buckets
        ]
        self._buckets_of_layer: dict[int, set[int]] = {}
        for number, names in enumerate(buckets):
            for name in names:
                self._buckets_of_layer.setdefault(layers[name], set()).add(number)
        self._gathering: dict[int, list[CollectiveHandle]] = {}

    @property
    def owned(self) -> dict[str, OwnedParameter]:
        """Return the parameters that this rank updates, by global name; frozen ones are whole."""
        owned = {name: OwnedParameter.full(p) for name, p in self._frozen.items()}
        for bucket in self._each():
            owned |= bucket.owned
        return owned

    def _each(self) -> list[ShardedBucket]:
        return [bucket for buckets in self.buckets for bucket in buckets]

    def begin(self) -> None:
        """Begin a step; raise ConfigError for a parameter that was frozen and no longer is."""
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ConfigError(
                    f"outer.shard=flat: {name} was frozen when the optimizer was created, so it is "
                    f"in no shard, but requires_grad is True now; unfreeze it before "
                    f"pipe.optimizer, or use outer.shard=none"
                )
        for bucket in self._each():
            bucket.begin()

    def check_memory(self) -> None:
        """Raise ConfigError if the data of a parameter is no longer in the buffer of its bucket."""
        for bucket in self._each():
            bucket.check_memory()

    def drop(self) -> None:
        """Discard the gradients of the step."""
        for bucket in self._each():
            bucket.drop()

    def gather_gradients(self) -> dict[str, Tensor | None]:
        """Return copies of all whole gradients; all replicas must call this."""
        gradients: dict[str, Tensor | None] = dict.fromkeys(self._frozen)
        for bucket in self._each():
            gradients |= bucket.gather_gradients()
        return gradients

    def numbers_with(self, parameters: set[nn.Parameter]) -> list[int]:
        """Return the buckets with some of these parameters, those of the first layers first."""
        return [
            number
            for number in reversed(range(len(self.buckets)))
            if any(not parameters.isdisjoint(bucket.whole) for bucket in self.buckets[number])
        ]

    def start_gathering(self, number: int) -> list[CollectiveHandle]:
        """Start the all-gather of a bucket's parameters, whose shards all replicas have updated."""
        self._gathering[number] = [bucket.start_gathering() for bucket in self.buckets[number]]
        return self._gathering[number]

    @property
    def is_gathering(self) -> bool:
        """Return whether parameters may not have arrived yet."""
        return bool(self._gathering)

    @property
    def gathering(self) -> Iterator[tuple[int, CollectiveHandle]]:
        """Yield each all-gather that was not waited for, with the number of its bucket."""
        for number, started in self._gathering.items():
            for pending in started:
                yield number, pending

    def wait(self, number: int) -> None:
        """Wait for the parameters of a bucket."""
        if self._gathering.pop(number, None) is not None:
            for bucket in self.buckets[number]:
                bucket.wait_for_parameters()

    def wait_for_layer(self, index: int) -> None:
        """Wait for the parameters of a layer, by its global index."""
        for number in sorted(self._buckets_of_layer.get(index, ()), reverse=True):
            self.wait(number)

    def wait_for_all(self) -> None:
        """Wait for all parameters."""
        for number in sorted(self._gathering, reverse=True):
            self.wait(number)


class GradientBuckets:
    """The gradients, in buckets, of parameters with the same replicas.

    Args:
        named: The parameters by global name.
        device: Device of their layers.
        layers: Index of the layer that uses each parameter, for `shard`.
        is_flat: Use flat buffers even if there is no other replica.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        device: Device,
        layers: Mapping[str, int] | None = None,
        *,
        is_flat: bool = False,
    ) -> None:
        self.named, self.device = dict(named), device
        self._names_by_id = {id(parameter): name for name, parameter in named.items()}
        self.shards: ParameterShards | None = None
        self._layers, self._is_flat = layers or {}, is_flat
        self._strategy: ReduceStrategy | None = None
        self._names: Sequence[Sequence[str]] = ()
        self._trained: list[bool] | None = None
        self._buckets: Sequence[list[Bucket] | list[LocalGradients] | list[ShardedBucket]] = []
        self._late: list[Bucket] | list[LocalGradients] = []

    def reduce_by(
        self, strategy: ReduceStrategy | None, buckets: Sequence[Sequence[str]] = ()
    ) -> None:
        """Set how gradients are reduced, and the parameters of each bucket.

        Args:
            strategy: Starts a reduction; None if there is no other replica.
            buckets: Names in each bucket; if empty, one bucket for each dtype and device.
        """
        self._strategy, self._names, self._trained = strategy, buckets, None

    def shard(self, buckets: Sequence[Sequence[str]], group: Group) -> None:
        """Shard gradients and parameters over the replicas from now on."""
        self.shards = ParameterShards(self.named, buckets, self._layers, group)
        self._late = []

    def owned(self) -> dict[str, OwnedParameter]:
        """Return the parameters for which this rank has gradients, by global name."""
        if self.shards is not None:
            return self.shards.owned
        return {name: OwnedParameter.full(p) for name, p in self.named.items()}

    def rebuild(self) -> None:
        """Create buckets for the parameters that are trained now, unless they are sharded."""
        trained = [p.requires_grad for p in self.named.values()]
        if self.shards is None and trained != self._trained:
            self._trained = trained
            self._buckets = [self._make(group) for group in self._groups()]
            self._late = []

    def clear(self) -> None:
        """Begin a step.

        A parameter that was frozen since `rebuild` stays in its bucket with a gradient of zeros.
        One that was unfrozen gets a bucket of its own, which is reduced at the end of the step.
        """
        if self.shards is not None:
            self.shards.begin()
            self._buckets = self.shards.buckets
        else:
            self._late = self._make(self._unfrozen())
        for parameter in self.named.values():
            if not parameter.requires_grad:
                parameter.grad = None
        for bucket in self._each():
            bucket.clear()

    def _unfrozen(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters that are in no bucket."""
        if self._trained is None:
            return self.named
        pairs = zip(self.named.items(), self._trained, strict=True)
        return {n: p for (n, p), was_trained in pairs if p.requires_grad and not was_trained}

    def _groups(self) -> list[dict[str, nn.Parameter]]:
        groups = [{name: self.named[name] for name in names} for names in self._names]
        return groups or [self.named]

    def _make(self, group: Mapping[str, nn.Parameter]) -> list[Bucket] | list[LocalGradients]:
        kinds = by_kind({name: p for name, p in group.items() if p.requires_grad})
        if self._strategy is None and not self._is_flat:
            return [LocalGradients(list(kind.values()), self.device) for kind in kinds]
        return [Bucket(kind) for kind in kinds]

    def _each(self) -> list[Bucket | LocalGradients | ShardedBucket]:
        """Return all buckets of this step by number."""
        return [bucket for buckets in (*self._buckets, self._late) for bucket in buckets]

    @property
    def num_buckets(self) -> int:
        """Return the number of buckets, including those without a trained parameter."""
        return len(self._buckets)

    def parameters_of(self, number: int) -> list[nn.Parameter]:
        """Return the parameters of a bucket that are trained in this step."""
        parameters = (p for bucket in self._buckets[number] for p in bucket.parameters)
        return [parameter for parameter in parameters if parameter.requires_grad]

    def unshare(self) -> None:
        """Copy gradients of the last backward pass whose memory is shared with other tensors."""
        for bucket in self._each():
            bucket.unshare()

    def start_reduction(self, number: int) -> list[CollectiveHandle]:
        """Start the reduction of a bucket whose gradients are complete."""
        started = [bucket.start_reduction(self._strategy) for bucket in self._buckets[number]]
        return [pending for pending in started if pending is not None]

    def late(self, number: int) -> list[nn.Parameter]:
        """Return the parameters of a bucket whose gradients changed after its reduction started."""
        return [parameter for bucket in self._buckets[number] for parameter in bucket.late()]

    def collect_late(self) -> list[nn.Parameter]:
        """Return the parameters that are reduced at the end, and record which of them were used."""
        for bucket in self._late:
            if isinstance(bucket, Bucket):
                bucket.collect()
        return [parameter for bucket in self._late for parameter in bucket.parameters]

    def start_late(self) -> None:
        """Start the reductions of unfrozen parameters, which must be the same on all replicas."""
        for bucket in self._late:
            bucket.start_reduction(self._strategy)

    def used_flags(self) -> list[bool]:
        """Return for each of `trained_names` whether this replica used the parameter."""
        return [flag for bucket in self._each() for flag in bucket.used()]

    def trained_names(self) -> list[str]:
        """Return the names of the parameters in this step's buckets, bucket by bucket."""
        names = self._names_by_id
        return [names[id(p)] for bucket in self._each() for p in bucket.parameters]

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the global name of a parameter."""
        return self._names_by_id[id(parameter)]

    def wait(self) -> None:
        """Wait for all reductions."""
        for bucket in self._each():
            bucket.wait()

    def finish(self, divisor: Divisor, used: Sequence[bool]) -> None:
        """Wait for all reductions and divide the gradients.

        Args:
            divisor: Divides the gradients.
            used: For each of `trained_names`, whether any replica used the parameter.
        """
        start = 0
        for bucket in self._each():
            stop = start + len(bucket.parameters)
            bucket.finish(divisor, used[start:stop])
            start = stop


class AccumulationHook:
    """Hook on a parameter that autograd calls after each accumulation into its gradient."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, parameter: Tensor) -> None:
        """Report an accumulation into the gradient."""
        self._call()


Place = tuple[int, int]
"""Index of a set of parameters, and number of one of its buckets."""


class GradientReducer:
    """Starts the reductions of a rank in an order that is the same on all replicas.

    A bucket is reduced when the schedule reaches its action (`reach`), or earlier, as soon as its
    gradients are complete, during the last backward pass of its set (`overlapping`), but never
    before a bucket that precedes it in the order.

    Args:
        order: Index of a set and number of a bucket (None: all its buckets) of each reduction.
        gradients: The sets by index.
        start: Called to reduce a bucket.
    """

    def __init__(
        self,
        order: Sequence[tuple[int, int | None]],
        gradients: Mapping[int, GradientBuckets],
        start: Callable[[int, int], None],
    ) -> None:
        self._turns, self._gradients, self._start = order, gradients, start
        self._order: list[Place] = []
        self._num_started = 0
        # How often the backward of a micro-batch adds to each parameter: more than once if a
        # layer's own checkpointing runs backwards within it. Known from earlier steps.
        self._expected: Counter[nn.Parameter] = Counter()
        self._seen: dict[int, Counter[nn.Parameter]] = {}

    def begin(self) -> None:
        """Begin a step, after the buckets were created."""
        self._num_started = 0
        self._seen = {index: Counter() for index in self._gradients}
        self._order = [place for index, number in self._turns for place in self._of(index, number)]

    def _of(self, index: int, number: int | None) -> list[Place]:
        if number is not None:
            return [(index, number)]
        return [(index, each) for each in range(self._gradients[index].num_buckets)]

    def reach(self, index: int, number: int | None) -> None:
        """Reduce a bucket, or all buckets of a set, unless their reduction has started earlier."""
        for place in self._of(index, number):
            if place in self._order[self._num_started :]:
                assert self._order[self._num_started] == place, f"{place} is out of turn"
                self._start_next()

    def _start_next(self) -> None:
        index, number = self._order[self._num_started]
        self._num_started += 1
        self._start(index, number)

    @contextmanager
    def overlapping(self, index: int, *, is_last: bool) -> Iterator[None]:
        """Return a context manager that reduces buckets during the last backward pass of a set.

        Args:
            index: The set.
            is_last: Whether this is the last backward pass of the set. If the backward pass is
                split, an ``I`` before the last ``W`` is not, but computes some of the gradients.

        Raises ModelError if a gradient changes after its bucket was reduced.
        """
        gradients, seen, expected = self._gradients[index], self._seen[index], self._expected

        def is_complete(parameter: nn.Parameter) -> bool:
            return seen[parameter] >= expected[parameter] > 0

        def note_addition(number: int, parameter: nn.Parameter) -> None:
            seen[parameter] += 1
            if is_last and is_complete(parameter):
                awaited[number].discard(parameter)
                self._start_complete(index, awaited)

        numbered = {n: gradients.parameters_of(n) for n in range(gradients.num_buckets)}
        awaited = {n: {p for p in each if not is_complete(p)} for n, each in numbered.items()}
        hooks = [
            _register(parameter, partial(note_addition, n, parameter))
            for n, each in numbered.items()
            for parameter in each
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        started = [number for at, number in self._order[: self._num_started] if at == index]
        late = [parameter for number in started for parameter in gradients.late(number)]
        if late:
            raise ModelError(
                f"{gradients.name_of(late[0])}: the gradient changed after its bucket was sent to "
                f"be summed over replicas, expected {expected[late[0]]} accumulation(s) per "
                f"micro-batch, as in earlier steps, got more; use outer.overlap=false"
            )
        if is_last:
            expected |= seen

    def _start_complete(self, index: int, awaited: Mapping[int, set[nn.Parameter]]) -> None:
        """Reduce the next buckets in the order whose gradients are complete."""
        while self._num_started < len(self._order):
            at, number = self._order[self._num_started]
            if at != index or awaited[number]:
                return
            self._start_next()


def _register(parameter: nn.Parameter, call: Callable[[], None]) -> RemovableHandle:
    register: Callable[[Callable[[Tensor], None]], RemovableHandle] = (
        parameter.register_post_accumulate_grad_hook
    )
    return register(AccumulationHook(call))
