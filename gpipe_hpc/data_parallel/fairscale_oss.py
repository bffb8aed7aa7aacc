"""``outer.shard=oss``: fairscale's OSS divides whole tensors over the copies of a stage.

OSS clips, and by default broadcasts, over the world, where stages are different models; it has no
state by name, and gathers its state by pickles; one flat buffer is of one dtype; tied parameters
belong to ranks of several stages. So there is one OSS for each group of copies and dtype, which
decides who owns what and broadcasts what was updated. The optimizer itself is the user's, with this
rank's tensors alone. A file of its own, as fairscale takes a second to import.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from fairscale.optim.oss import OSS
from torch import nn
from torch.optim import Optimizer

from gpipe_hpc.comm.collectives.group import Group
from gpipe_hpc.data_parallel.layout import in_owner_order
from gpipe_hpc.data_parallel.optimizers import replace_parameters
from gpipe_hpc.data_parallel.reducer import GradientBuckets
from gpipe_hpc.errors import ConfigError


class _NoOptimizer(Optimizer):
    """The optimizer within an OSS: it does nothing, as the user's own has stepped."""

    def __init__(self, groups: Any, **options: Any) -> None:
        super().__init__(groups, options)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Do nothing."""


class OssSharding:
    """Gives each copy whole tensors to update, which it broadcasts after each step.

    Gradients are those that all copies have. A tied parameter is updated by all that hold it.

    Args:
        gradients: This rank's sets of parameters.
        copies: The ranks that hold each set.

    Raises ConfigError if ranks are threads: OSS needs process groups.
    """

    shards_gradients = False
    is_gathering = False

    def __init__(
        self, gradients: Mapping[int, GradientBuckets], copies: Mapping[int, Group]
    ) -> None:
        self._gradients, self._copies = dict(sorted(gradients.items())), copies
        if any(group.size > 1 and group.torch_group is None for group in copies.values()):
            raise ConfigError(
                "outer.shard=oss: expected ranks that are processes of torch.distributed, which "
                "fairscale's OSS needs, got threads; start processes, or use outer.shard=flat"
            )
        self.not_owned: set[str] = set()

    def attach(self, optimizer: Optimizer, whole: Mapping[str, nn.Parameter]) -> None:
        """Let an optimizer update this rank's tensors; all are broadcast after each step."""
        given = {p for group in optimizer.param_groups for p in group["params"]}
        shards: list[OSS] = []
        named: dict[str, nn.Parameter] = {}
        others: set[str] = set()
        for group, kind in self._kinds(given):
            oss = _make_oss(group, kind)
            shards.append(oss)
            named |= kind
            others |= {name for name, p in kind.items() if p not in _owned_by(oss)}
        self.not_owned |= others
        replace_parameters(optimizer, {whole[name]: None for name in others})
        known = _memory_of(named.values())

        def after_step(each: Optimizer, args: Any, kwargs: Any) -> None:
            nonlocal known
            # OSS broadcasts buffers of its own, which the parameters lie in until they are moved.
            has_changed = _memory_of(named.values()) != known
            for oss in shards:
                if has_changed:
                    oss.refresh_trainable()
                oss.step()
            known = _memory_of(named.values()) if has_changed else known

        optimizer.register_step_post_hook(after_step)

    def _kinds(self, given: set[nn.Parameter]) -> list[tuple[Group, dict[str, nn.Parameter]]]:
        """Return what one OSS divides: parameters of a group, dtype and device.

        In one order on all copies.
        """
        kinds: dict[tuple[int, torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
        groups = {id(group): group for group in self._copies.values()}
        for index, each in self._gradients.items():
            group = self._copies[index]
            for name, p in each.named.items():
                if group.size > 1 and p in given and p.numel():
                    kinds.setdefault((id(group), p.dtype, p.device), {})[name] = p
        return [(groups[key[0]], named) for key, named in kinds.items()]

    def wait(self) -> None:
        """Return at once: broadcasts end with the optimizer's step."""


def _make_oss(group: Group, named: Mapping[str, nn.Parameter]) -> OSS:
    sizes = {name: parameter.numel() for name, parameter in named.items()}
    parameters = [named[name] for name in in_owner_order(sizes)]
    with warnings.catch_warnings():  # it calls torch by a deprecated name
        warnings.filterwarnings("ignore", category=FutureWarning, module="fairscale")
        return OSS(parameters, optim=_NoOptimizer, group=group.torch_group)


def _owned_by(oss: OSS) -> set[nn.Parameter]:
    """Return the parameters that this rank updates."""
    return {p for group in oss.partition_parameters()[oss.rank] for p in group["params"]}


def _memory_of(parameters: Iterable[nn.Parameter]) -> list[tuple[bool, int]]:
    """Return which parameters are trained, and where each lies."""
    return [(parameter.requires_grad, parameter.data_ptr()) for parameter in parameters]
