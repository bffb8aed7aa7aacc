"""``outer.shard=oss``: whole tensors divided over the copies of a stage by fairscale's OSS.

What OSS lacked here: it clips, and by default broadcasts, over the world, where stages are
different models; it has no state by name, and puts its state together by pickles; one flat buffer
is of one dtype; tied parameters belong to ranks of several stages. So there is one OSS for each
group of copies and dtype, which says who owns what and broadcasts what was updated. The optimizer
itself is the user's, with this rank's tensors alone.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from fairscale.optim.oss import OSS
from torch import nn
from torch.optim import Optimizer

from gpipe_hpc.comm.group import Group
from gpipe_hpc.engine.outer.held import Held
from gpipe_hpc.engine.outer.optimizers import keep_only
from gpipe_hpc.engine.outer.owners import in_turn
from gpipe_hpc.engine.stages.stage import Stage
from gpipe_hpc.errors import ConfigError


class _Stepped(Optimizer):
    """The optimizer within an OSS: it does nothing, as the user's own has stepped."""

    def __init__(self, groups: Any, **options: Any) -> None:
        super().__init__(groups, options)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Do nothing."""


class _Kind(NamedTuple):
    """What one OSS is for: a group of copies, and parameters of one dtype and device."""

    group: Group
    named: dict[str, nn.Parameter]


class OwnerSharing:
    """Gives each copy of a stage whole tensors to update, which it then broadcasts.

    Gradients are those that all copies have. A tied parameter is updated by all that hold it.
    Raises ConfigError where ranks are threads: OSS needs process groups.
    """

    divides_gradients = False
    is_under_way = False

    def __init__(self, stages: Mapping[int, Stage], copies: Mapping[int, Group]) -> None:
        self._stages, self._copies = dict(sorted(stages.items())), copies
        if any(group.size > 1 and group.torch_group is None for group in copies.values()):
            raise ConfigError(
                "outer.shard=oss: expected ranks that are processes of torch.distributed, which "
                "fairscale's OSS needs, got threads; start processes, or use outer.shard=flat"
            )
        self._left_out: set[str] = set()

    def take(self, optimizer: Optimizer, whole: Mapping[str, nn.Parameter]) -> None:
        """Let an optimizer update this rank's tensors; all are broadcast behind each step."""
        given = {p for group in optimizer.param_groups for p in group["params"]}
        divided = [self._divided(kind) for kind in self._kinds(given)]
        others = {n for oss, named in divided for n in named if named[n] not in _own(oss)}
        self._left_out |= others
        keep_only(optimizer, {whole[name]: None for name in others})
        named = {name: p for _, each in divided for name, p in each.items()}
        seen = _seen(named)

        def after(each: Optimizer, args: Any, kwargs: Any) -> None:
            nonlocal seen
            # It broadcasts buffers of its own, which the parameters lie in until they are moved.
            has_changed = _seen(named) != seen
            for oss, _ in divided:
                if has_changed:
                    oss.refresh_trainable()
                oss.step()
            seen = _seen(named) if has_changed else seen

        optimizer.register_step_post_hook(after)

    def _divided(self, kind: _Kind) -> tuple[OSS, dict[str, nn.Parameter]]:
        sizes = {name: parameter.numel() for name, parameter in kind.named.items()}
        parameters = [kind.named[name] for name in in_turn(sizes)]
        with warnings.catch_warnings():  # it calls torch by a name of old
            warnings.filterwarnings("ignore", category=FutureWarning, module="fairscale")
            oss = OSS(parameters, optim=_Stepped, group=kind.group.torch_group)
        return oss, kind.named

    def _kinds(self, given: set[nn.Parameter]) -> Iterator[_Kind]:
        """Yield what is divided together, in one order on all copies."""
        kinds: dict[tuple[int, torch.dtype, torch.device], _Kind] = {}
        for index, stage in self._stages.items():
            group = self._copies[index]
            for name, p in stage.named_parameters().items():
                if group.size > 1 and p in given and name not in stage.tied and p.numel():
                    key = id(group), p.dtype, p.device
                    kinds.setdefault(key, _Kind(group, {})).named[name] = p
        yield from kinds.values()

    def held(self) -> dict[str, Held]:
        """Return what this rank updates, by global name."""
        return {
            name: held
            for stage in self._stages.values()
            for name, held in stage.held().items()
            if name not in self._left_out
        }

    def wait(self) -> None:
        """Return at once: broadcasts are over when the optimizer's step is."""


def _own(oss: OSS) -> set[nn.Parameter]:
    """Return the parameters that this rank updates."""
    return {p for group in oss.partition_parameters()[oss.rank] for p in group["params"]}


def _seen(named: Mapping[str, nn.Parameter]) -> list[tuple[bool, int]]:
    """Return which parameters are trained, and where each lies."""
    return [(parameter.requires_grad, parameter.data_ptr()) for parameter in named.values()]
