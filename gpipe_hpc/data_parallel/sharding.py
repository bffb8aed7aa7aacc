"""Make optimizers for the parameters of a rank, with state that may be sharded (ZeRO)."""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import nn, optim
from torch.optim import Optimizer

from gpipe_hpc.comm.collectives.group import CollectiveHandle, Group
from gpipe_hpc.data_parallel.layout import Buckets, in_owner_order
from gpipe_hpc.data_parallel.optimizer_checks import check_elementwise, check_separable
from gpipe_hpc.data_parallel.reducer import GradientBuckets
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.settings import Outer


class FlatSharding:
    """``outer.shard=flat``: each replica updates an equal shard of every bucket; then all-gather.

    Parameters are sharded when the first optimizer is created. A set without other replicas is not
    sharded; nor is a tied parameter, which ranks of several stages have.

    Args:
        gradients: This rank's sets of parameters.
        copies: The replicas of each set.
        buckets: The buckets of each set of the model.
    """

    shards_gradients = True
    not_owned: Set[str] = frozenset()

    def __init__(
        self,
        gradients: Mapping[int, GradientBuckets],
        copies: Mapping[int, Group],
        buckets: tuple[Buckets, ...],
    ) -> None:
        self._gradients = dict(sorted(gradients.items()))
        self._copies, self._buckets = copies, buckets
        self._is_sharded = False
        self._pending: list[CollectiveHandle] = []
        # No process may exit during an all-gather: other ranks wait for its shards.
        weakref.finalize(self, _finish, self._pending)

    def attach(self, optimizer: Optimizer, whole: Mapping[str, nn.Parameter]) -> None:
        """Make an optimizer update this rank's shards, and all-gather after each of its steps.

        Raises ConfigError unless it updates each element independently and has no state yet.
        """
        check_elementwise(optimizer)
        if not self._is_sharded:
            self._shard()
        own: dict[nn.Parameter, nn.Parameter | None] = {}
        for each in self._gradients.values():
            if each.shards is not None:
                owned = each.shards.owned
                own |= {
                    p: owned[n].parameter if n in owned else None for n, p in each.named.items()
                }
        places = self._places_of({p for group in optimizer.param_groups for p in group["params"]})
        replace_parameters(optimizer, own)
        sharded = {p for p, part in own.items() if part is not p}
        num_groups = len(optimizer.param_groups)

        def before_step(each: Optimizer, args: Any, kwargs: Any) -> None:
            if len(each.param_groups) != num_groups:
                _refuse_later_groups(each, sharded)
            self.wait()

        def after_step(each: Optimizer, args: Any, kwargs: Any) -> None:
            self._start_gathering(places)

        optimizer.register_step_pre_hook(before_step)
        optimizer.register_step_post_hook(after_step)

    def _shard(self) -> None:
        self._is_sharded = True
        for index, each in self._gradients.items():
            if self._copies[index].size > 1:
                each.shard(self._buckets[index], self._copies[index])

    def _places_of(self, parameters: set[nn.Parameter]) -> list[tuple[int, int]]:
        """Return (set, bucket) of the buckets with some of these parameters, in all-gather order.

        Those of the first layers come first. The result is equal on all replicas.
        """
        return [
            (index, number)
            for index, each in self._gradients.items()
            if each.shards is not None
            for number in each.shards.numbers_with(parameters)
        ]

    def _start_gathering(self, places: Iterable[tuple[int, int]]) -> None:
        for index, number in places:
            shards = self._gradients[index].shards
            assert shards is not None, "only what is sharded has places"
            self._pending += shards.start_gathering(number)

    @property
    def is_gathering(self) -> bool:
        """Return whether parameters that other ranks have updated may not have arrived."""
        return bool(self._pending)

    def wait(self) -> None:
        """Wait for all parameters."""
        for each in self._gradients.values():
            if each.shards is not None:
                each.shards.wait_for_all()
        self._pending.clear()


def _refuse_later_groups(optimizer: Optimizer, sharded: set[nn.Parameter]) -> None:
    groups = enumerate(optimizer.param_groups)
    found = next((i for i, g in groups if not sharded.isdisjoint(g["params"])), None)
    if found is not None:
        raise ConfigError(
            f"outer.shard=flat: parameter group {found} was added after pipe.optimizer had created "
            f"the optimizer, but its parameters are sharded over replicas; create all groups in "
            f"the function, or create another optimizer with pipe.optimizer"
        )


def _finish(pending: list[CollectiveHandle]) -> None:
    for each in pending:
        with suppress(Exception):
            each.wait()


class _NoOptimizer(Optimizer):
    """Optimizer without effect, for OSS to wrap: the user's optimizer has already stepped."""

    def __init__(self, groups: Any, **options: Any) -> None:
        super().__init__(groups, options)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Do nothing."""


class OssSharding:
    """``outer.shard=oss``: each replica updates whole tensors and broadcasts them after each step.

    One OSS of fairscale for each group of replicas and each dtype assigns an owner to each tensor
    and broadcasts updated tensors; the user's optimizer steps on the tensors of this rank. OSS is
    not used for more: it clips over the whole world, in which stages are different models, does not
    store state by name, gathers state as pickles, and has flat buffers of one dtype.

    All replicas have the same gradients. A tied parameter, which ranks of several stages have, is
    updated by all of them.

    Args:
        gradients: This rank's sets of parameters.
        copies: The replicas of each set.

    Raises ConfigError without fairscale, and if ranks are threads: OSS needs process groups.
    """

    shards_gradients = False
    is_gathering = False

    def __init__(
        self, gradients: Mapping[int, GradientBuckets], copies: Mapping[int, Group]
    ) -> None:
        try:
            from fairscale.optim.oss import OSS  # takes a second to load
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"outer.shard=oss needs fairscale, which cannot be imported ({error}); install it, "
                f"or use outer.shard=flat"
            ) from None
        self._oss = OSS
        self._gradients, self._copies = dict(sorted(gradients.items())), copies
        if any(group.size > 1 and group.torch_group is None for group in copies.values()):
            raise ConfigError(
                "outer.shard=oss needs process groups of torch.distributed, but ranks are threads; "
                "start processes, or use outer.shard=flat"
            )
        self.not_owned: set[str] = set()

    def attach(self, optimizer: Optimizer, whole: Mapping[str, nn.Parameter]) -> None:
        """Make an optimizer update this rank's tensors, and broadcast after each of its steps."""
        given = {p for group in optimizer.param_groups for p in group["params"]}
        shards: list[Any] = []
        named: dict[str, nn.Parameter] = {}
        others: set[str] = set()
        for group, kind in self._kinds(given):
            oss = self._make(group, kind)
            shards.append(oss)
            named |= kind
            others |= {name for name, p in kind.items() if p not in _owned_by(oss)}
        self.not_owned |= others
        replace_parameters(optimizer, {whole[name]: None for name in others})
        known = _memory_of(named.values())

        def after_step(each: Optimizer, args: Any, kwargs: Any) -> None:
            nonlocal known
            # OSS broadcasts its own buffers. Parameters are views of them until they are moved.
            has_changed = _memory_of(named.values()) != known
            for oss in shards:
                if has_changed:
                    oss.refresh_trainable()
                oss.step()
            known = _memory_of(named.values()) if has_changed else known

        optimizer.register_step_post_hook(after_step)

    def _kinds(self, given: set[nn.Parameter]) -> list[tuple[Group, dict[str, nn.Parameter]]]:
        """Return the parameters of each OSS: those of one group, dtype and device.

        The order is equal on all replicas.
        """
        kinds: dict[tuple[int, torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
        groups = {id(group): group for group in self._copies.values()}
        for index, each in self._gradients.items():
            group = self._copies[index]
            for name, p in each.named.items():
                if group.size > 1 and p in given and p.numel():
                    kinds.setdefault((id(group), p.dtype, p.device), {})[name] = p
        return [(groups[key[0]], named) for key, named in kinds.items()]

    def _make(self, group: Group, named: Mapping[str, nn.Parameter]) -> Any:
        sizes = {name: parameter.numel() for name, parameter in named.items()}
        parameters = [named[name] for name in in_owner_order(sizes)]
        with warnings.catch_warnings():  # fairscale uses a deprecated name of torch
            warnings.filterwarnings("ignore", category=FutureWarning, module="fairscale")
            return self._oss(parameters, optim=_NoOptimizer, group=group.torch_group)

    def wait(self) -> None:
        """Do nothing: broadcasts end with the optimizer's step."""


def _owned_by(oss: Any) -> set[nn.Parameter]:
    """Return the parameters that this rank updates."""
    return {p for group in oss.partition_parameters()[oss.rank] for p in group["params"]}


def _memory_of(parameters: Iterable[nn.Parameter]) -> list[tuple[bool, int]]:
    """Return whether each parameter is trained, and the address of its memory."""
    return [(parameter.requires_grad, parameter.data_ptr()) for parameter in parameters]


OptimizerSharding = FlatSharding | OssSharding
"""How optimizer state is sharded over replicas; see ``outer.shard``."""


def choose_sharding(
    outer: Outer,
    gradients: Mapping[int, GradientBuckets],
    copies: Mapping[int, Group],
    buckets: tuple[Buckets, ...],
) -> OptimizerSharding | None:
    """Return the sharding of optimizer state over replicas; None if it is not sharded.

    Args:
        outer: The settings.
        gradients: This rank's sets of parameters.
        copies: The replicas of each set.
        buckets: The buckets of each set of the model; empty if there are no replicas.

    Raises ConfigError for ``outer.shard=oss`` without fairscale.
    """
    if outer.shard == "none" or not buckets:
        return None
    if outer.shard == "flat":
        return FlatSharding(gradients, copies, buckets)
    return OssSharding(gradients, copies)


O = TypeVar("O", bound=Optimizer)

Factory = Callable[[list[nn.Parameter]], O]
"""Function that creates an optimizer for the parameters of a rank."""


class NoParameters(list[nn.Parameter]):
    """An empty list of parameters for which torch's optimizers can be constructed.

    Iterating over it yields a parameter without elements, because optimizers refuse an empty list.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._placeholder = nn.Parameter(torch.empty(0, 0, device=device))

    def __iter__(self) -> Iterator[nn.Parameter]:
        """Yield the parameter without elements."""
        return iter([self._placeholder])


def make_optimizer(
    factory: Factory[O],
    whole: Mapping[str, nn.Parameter],
    sharding: OptimizerSharding | None,
    *,
    has_all: bool,
) -> O:
    """Call a user's function that creates an optimizer for this rank's parameters.

    Args:
        factory: The user's function.
        whole: The parameters by global name; may be empty.
        sharding: How optimizer state is sharded over replicas; None if it is not.
        has_all: Whether the rank has all parameters of the model.

    Raises ConfigError for an optimizer that cannot update a part of the model, or cannot be
    sharded.
    """
    # torch refuses an optimizer without parameters: a placeholder is removed afterwards.
    placeholder = nn.Parameter(torch.zeros(1, 1))
    optimizer = factory(list(whole.values()) or [placeholder])
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"pipe.optimizer: expected the function to return a torch.optim.Optimizer, got "
            f"{type(optimizer).__name__}; return the optimizer"
        )
    if isinstance(optimizer, optim.SparseAdam):
        raise ConfigError(
            "pipe.optimizer: SparseAdam needs sparse gradients, but those of "
            "nn.Embedding(sparse=True) are made dense before they are summed; use torch.optim.Adam"
        )
    if not whole:
        replace_parameters(optimizer, {placeholder: None})
    if sharding is not None:
        sharding.attach(optimizer, whole)
    if sharding is not None or not has_all:
        check_separable(optimizer)
    return optimizer


def replace_parameters(
    optimizer: Optimizer, replacements: Mapping[nn.Parameter, nn.Parameter | None]
) -> None:
    """Replace parameters of an optimizer; None removes a parameter and its state.

    Other parameters, and the options and names of parameter groups, are kept.
    """
    for group in optimizer.param_groups:
        params = group["params"]
        names = group.get("param_names") or [None] * len(params)
        pairs = [(replacements.get(p, p), name) for p, name in zip(params, names, strict=True)]
        kept = [(p, name) for p, name in pairs if p is not None]
        group["params"] = [p for p, _ in kept]
        if "param_names" in group:
            group["param_names"] = [name for _, name in kept]
    for parameter, other in replacements.items():
        if other is None:
            optimizer.state.pop(parameter, None)
