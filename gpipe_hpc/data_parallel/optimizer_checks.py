"""Check whether an optimizer can work on a part of the model.

For torch's own optimizers the answer is known. Others are tried on small tensors.

With ``outer.shard=flat``, the optimizer of a rank updates a flattened shard of the elements. So the
steps of one optimizer on some tensors are compared with those of two optimizers, each for a part of
every tensor. One tensor is a matrix, large enough for optimizers that treat small ones differently.
Gradients have many magnitudes, and there are more steps than the warm-up of optimizers takes.

A rank has only some of the parameters. So a second check tries whether a step on one parameter
depends on the gradients of others.
"""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from gpipe_hpc.errors import ConfigError

_ELEMENTWISE: Final = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)
_SMALL: Final = ((4, 3), (7,), (3, 2, 2, 2))
_LARGE: Final = (130, 136)
_MANY, _FEW = 130, 12  # steps on small tensors, and on the large one
_STEPS_OF_TWO: Final = 3  # on two matrices
_ZEROS: Final = 7  # every 7th step, gradients of the first part of each tensor are zero
# Attributes that belong to one object.
_HOOKS: Final = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise ConfigError unless the optimizer updates each element independently.

    The optimizer itself is not changed.
    """
    name = type(optimizer).__name__
    if any(optimizer.state.values()):
        raise ConfigError(
            f"outer.shard=flat: {name} has created its state for whole parameters, before its "
            f"first step; use outer.shard=oss, which assigns whole tensors to replicas"
        )
    if type(optimizer) in _ELEMENTWISE:
        return
    seen: list[dict[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "lr")}
        if _is_among(options, seen):
            continue
        tries = [(_SMALL, _MANY), *([] if seen else [((_LARGE,), _FEW)])]
        seen.append(options)
        try:
            differing = next(filter(None, (_differing(optimizer, number, *t) for t in tries)), 0)
            found = f"step {differing} on a tensor differs from steps on its parts"
        except Exception as error:
            differing, found = 1, f"{type(error).__name__}: {error}"
        if differing:
            raise ConfigError(
                f"outer.shard=flat: expected an optimizer that updates each element independently, "
                f"got {name}: {found}; use outer.shard=oss, which assigns whole tensors to replicas"
            )


def check_separable(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer whose step on a parameter depends on other parameters.

    A rank has only its own parameters. The options of each group are tried twice on two small
    matrices, with the gradients of one scaled in the second try. An optimizer that cannot be tried
    is accepted.
    """
    # Optimizers of gpipe_hpc update each parameter independently.
    if type(optimizer) in _ELEMENTWISE or type(optimizer).__module__.startswith("gpipe_hpc."):
        return
    if not isinstance(optimizer, optim.LBFGS):
        if _refers_to_parameters(optimizer):
            return
        try:
            alike, other = (_moved_first(optimizer, scale) for scale in (1.0, 100.0))
        except Exception:  # it may need parameters of another shape or dtype
            return
        if torch.equal(alike, other):
            return
    raise ConfigError(
        f"pipe.optimizer: expected an optimizer whose step on a parameter depends on its own "
        f"gradient, got {type(optimizer).__name__}, which combines parameters, and a rank has only "
        f"those of its stages; use another, such as torch.optim.AdamW, or one rank per pipeline"
    )


def _refers_to_parameters(optimizer: Optimizer) -> bool:
    """Return whether an attribute of the optimizer refers to its parameters."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = {n: v for n, v in vars(optimizer).items() if n not in ("param_groups", "state")}
    each = [v if isinstance(v, list | tuple) else [v] for v in named.values()]
    return any(id(value) in own for values in each for value in values)


def _moved_first(optimizer: Optimizer, scale: float) -> Tensor:
    """Return the values of the first of two matrices after some steps, for each group.

    Args:
        optimizer: The optimizer to try.
        scale: Factor of the gradients of the second matrix.
    """
    generator = torch.Generator().manual_seed(0)
    takes_closure = "closure" in signature(type(optimizer).step).parameters
    moved = []
    # A group may be empty on this rank: the matrices of all groups lie where the parameters do.
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    device = next(parameters, torch.zeros(1)).device

    def matrix() -> Tensor:
        return torch.randn(_SMALL[0], generator=generator, dtype=torch.float64).to(device)

    for number in range(len(optimizer.param_groups)):
        first, second = nn.Parameter(matrix()), nn.Parameter(matrix())
        probe = _probe_of(optimizer, number, [first, second])
        with torch.random.fork_rng(devices=[]):
            for _ in range(_STEPS_OF_TWO):
                first.grad, second.grad = matrix(), scale * matrix()
                if takes_closure:
                    probe.step(lambda: 0.0)
                else:
                    probe.step()
        moved.append(first.detach())
    return torch.cat(moved)


def _is_among(options: dict[str, Any], seen: Sequence[dict[str, Any]]) -> bool:
    return any(repr(options) == repr(other) for other in seen)


def _differing(
    optimizer: Optimizer, number: int, shapes: Sequence[tuple[int, ...]], num_steps: int
) -> int:
    """Return the first step, from 1, that changes parts unlike the whole; 0 if none does."""
    generator = torch.Generator().manual_seed(0)
    device = next(iter(optimizer.param_groups[number]["params"]), torch.zeros(1)).device
    sizes = [torch.Size(shape).numel() for shape in shapes]

    def numbers() -> Tensor:
        row = torch.randn(sum(sizes), generator=generator, dtype=torch.float64)
        return row.to(device)

    def divided(row: Tensor) -> list[list[Tensor]]:
        rows = torch.split(row, sizes)
        cuts = [size * 2 // 5 for size in sizes]
        whole = [own.view(shape) for own, shape in zip(rows, shapes, strict=True)]
        pairs = list(zip(rows, cuts, strict=True))
        return [whole, [own[:cut] for own, cut in pairs], [own[cut:] for own, cut in pairs]]

    was = numbers()
    ranks = [[nn.Parameter(value.clone()) for value in own] for own in divided(was)]
    probes = [_probe_of(optimizer, number, own) for own in ranks]
    with torch.random.fork_rng(devices=[]):
        for step in range(1, num_steps + 1):
            size = 10 ** float(torch.rand(1, generator=generator) * 6 - 4)
            gradients = divided(size * numbers())
            if step % _ZEROS == 0:
                torch._foreach_zero_(gradients[1])  # of the whole, too: they are views of one row
            for own, given in zip(ranks, gradients, strict=True):
                for parameter, gradient in zip(own, given, strict=True):
                    parameter.grad = gradient.clone()
            for probe in probes:
                probe.step()
            whole, first, second = ([p.detach() for p in own] for own in ranks)
            now = torch.cat([value.reshape(-1) for value in whole])
            other = torch.cat([part for pair in zip(first, second, strict=True) for part in pair])
            # Relative to the step's length: some move by a thousandth of a weight.
            near = 1e-6 * (now - was).abs().max() + 1e-12 * now.abs().max()
            if not bool((now - other).abs().max() <= near):
                return step
            was = now
    return 0


def _probe_of(optimizer: Optimizer, number: int, parameters: list[nn.Parameter]) -> Optimizer:
    """Return a copy of an optimizer for other parameters, with the options of one of its groups."""
    probe = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        is_filled = isinstance(value, list | dict | set | deque)
        probe.__dict__[name] = copy.copy(value) if is_filled else value
    # A learning-rate scheduler wraps `step`, bound to the original optimizer.
    probe.__dict__.pop("step", None)
    probe.__dict__ |= {hooks: OrderedDict() for hooks in _HOOKS}
    probe.state = defaultdict(dict)
    group = optimizer.param_groups[number]
    probe.param_groups = [{**group, "params": parameters}]
    if not group.get("lr", 1.0):  # a warm-up starts at 0, and without steps nothing is compared
        probe.param_groups[0]["lr"] = 1e-3
    for name, inner in vars(optimizer).items():
        if isinstance(inner, Optimizer) and number < len(inner.param_groups):
            probe.__dict__[name] = _probe_of(inner, number, parameters)
            if inner.param_groups is optimizer.param_groups:
                probe.param_groups = probe.__dict__[name].param_groups
            if inner.state is optimizer.state:
                probe.state = probe.__dict__[name].state
    return probe
