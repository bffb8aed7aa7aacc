"""Make optimizers for a part of the model, and check that they can work on a part.

torch's own optimizers are known. Others are tried on small tensors.

``outer.shard=flat`` gives each rank an optimizer for its flattened shard of the elements. So an
optimizer for some tensors is compared with two optimizers, each for a part of every tensor, by the
change of each step. One tensor is a matrix large enough for optimizers that treat small ones
differently. Gradients have many magnitudes, and there are more steps than optimizers warm up.

A rank has only some of the parameters. So the check also tries whether a step on one parameter
depends on the gradients of others.
"""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from inspect import signature
from typing import Any, Final, Protocol, TypeVar

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
_ZEROS: Final = 7  # of so many steps one has a gradient of zeros in the first part of each tensor
# Attributes that belong to one object.
_HOOKS: Final = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)

O = TypeVar("O", bound=Optimizer)

Factory = Callable[[list[nn.Parameter]], O]
"""Function that makes an optimizer for the parameters of a rank."""


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


class OptimizerSharding(Protocol):
    """How replicas share the state of optimizers (interface)."""

    @property
    def shards_gradients(self) -> bool:
        """Whether a replica has only its shard of the gradients."""

    @property
    def not_owned(self) -> Set[str]:
        """Global names of the parameters that other replicas update."""

    def attach(self, optimizer: Optimizer, whole: Mapping[str, nn.Parameter]) -> None:
        """Make an optimizer of whole parameters, by global name, update only this rank's share."""

    @property
    def is_gathering(self) -> bool:
        """Whether parameters that other ranks have updated may not have arrived yet."""

    def wait(self) -> None:
        """Wait for all parameters."""


def make_optimizer(
    factory: Factory[O],
    whole: Mapping[str, nn.Parameter],
    sharding: OptimizerSharding | None = None,
    *,
    has_all: bool = False,
) -> O:
    """Call a user's function that makes an optimizer for this rank's parameters.

    Args:
        factory: The user's function.
        whole: The parameters by global name; may be empty.
        sharding: How optimizer state is sharded over replicas; None if it is not.
        has_all: Whether the rank has all parameters of the model.

    Raises ConfigError for an optimizer that cannot be used for a part of the model, or not sharded.
    """
    # Torch refuses an optimizer without parameters: a placeholder is removed afterwards.
    placeholder = nn.Parameter(torch.zeros(1, 1))
    optimizer = factory(list(whole.values()) or [placeholder])
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"pipe.optimizer: expected the function to return a torch.optim.Optimizer, got "
            f"{type(optimizer).__name__}; return the optimizer"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            "pipe.optimizer: expected an optimizer of dense gradients, got SparseAdam: those of "
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


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise ConfigError unless the optimizer updates each element independently.

    The optimizer itself is not changed.
    """
    name = type(optimizer).__name__
    if any(optimizer.state.values()):
        raise ConfigError(
            f"outer.shard=flat: expected an optimizer that makes its state in its first step, got "
            f"{name}, which has made one for whole parameters already; use outer.shard=oss, which "
            f"divides whole tensors"
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
            found = f"step {differing} on a tensor is not that of its parts"
        except Exception as error:
            differing, found = 1, f"{type(error).__name__}: {error}"
        if differing:
            raise ConfigError(
                f"outer.shard=flat: expected an optimizer that updates each element by itself, got "
                f"{name}: {found}; use outer.shard=oss, which divides whole tensors"
            )


def check_separable(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer whose step on a parameter depends on other parameters.

    A rank has only its own parameters. The options of each group are tried twice on two small
    matrices, with the gradients of one scaled in the second try. An optimizer that cannot be tried
    is accepted.
    """
    # Ours look at one parameter at a time.
    if type(optimizer) in _ELEMENTWISE or type(optimizer).__module__.startswith("gpipe_hpc."):
        return
    if not isinstance(optimizer, optim.LBFGS):
        if _refers_to_parameters(optimizer):
            return
        try:
            alike, other = (_moved_first(optimizer, scale) for scale in (1.0, 100.0))
        except Exception:  # it may need parameters of another kind than ours
            return
        if torch.equal(alike, other):
            return
    raise ConfigError(
        f"pipe.optimizer: expected an optimizer whose step on a parameter depends on its own "
        f"gradient, got {type(optimizer).__name__}, which looks across parameters: each rank "
        f"would see its own alone; use another, as torch.optim.AdamW, or one rank a pipeline"
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
    probe.__dict__.pop("step", None)  # a schedule of learning rates binds it to the other one
    probe.__dict__ |= {hooks: OrderedDict() for hooks in _HOOKS}
    probe.state = defaultdict(dict)
    group = optimizer.param_groups[number]
    probe.param_groups = [{**group, "params": parameters}]
    if not group.get("lr", 1.0):  # it rises later: what does not move tells nothing
        probe.param_groups[0]["lr"] = 1e-3
    for name, inner in vars(optimizer).items():
        if isinstance(inner, Optimizer) and number < len(inner.param_groups):
            probe.__dict__[name] = _probe_of(inner, number, parameters)
            if inner.param_groups is optimizer.param_groups:
                probe.param_groups = probe.__dict__[name].param_groups
            if inner.state is optimizer.state:
                probe.state = probe.__dict__[name].state
    return probe
