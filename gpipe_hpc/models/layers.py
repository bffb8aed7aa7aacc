"""Layers of a pipeline: an `nn.Module`, or a `LayerSpec` that builds one where it is needed."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpipe_hpc.errors import ModelError, words_of


@dataclass(frozen=True, init=False, repr=False, eq=False)
class LayerSpec:
    """A layer described but not built: ``factory(*args, **kwargs)`` returns the module.

    Immutable; picklable if factory and arguments are. Specs are equal if their factories and
    arguments are (tensors compare by value); equal specs are assumed to have equal cost.

    Args:
        factory: a class or function that returns an nn.Module.
        args: positional arguments of the factory.
        kwargs: keyword arguments of the factory.

    Example::

        LayerSpec(nn.Linear, 1024, 4096, bias=False)
    """

    factory: Callable[..., nn.Module]
    args: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    ties: tuple[tuple[str, str], ...]
    stashes: tuple[str, ...]
    pops: tuple[str, ...]

    def __init__(self, factory: Callable[..., nn.Module], /, *args: Any, **kwargs: Any) -> None:
        if not callable(factory) or isinstance(factory, nn.Module):
            raise ModelError(
                f"LayerSpec: the factory must be a class or function that returns a module, got "
                f"{type(factory).__name__}; write LayerSpec(nn.Linear, 8, 8), or put a built "
                f"module into the sequence directly"
            )
        object.__setattr__(self, "factory", factory)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "keywords", tuple(kwargs.items()))
        object.__setattr__(self, "ties", ())
        object.__setattr__(self, "stashes", ())
        object.__setattr__(self, "pops", ())

    def tied(self, names: Mapping[str, str]) -> "LayerSpec":
        """Return a copy of this layer with tied parameters.

        `names` maps a parameter name within the layer to the name of a tie. All parameters of a tie
        are the same parameter, on any stages, with the initial weights of the first.
        """
        return self._with(ties=tuple(names.items()))

    def stashing(self, *names: str) -> "LayerSpec":
        """Return a copy of this layer that stashes values under these names for later layers.

        Its forward must return a tuple: the output, then one value per name, in order.
        """
        return self._with(stashes=names)

    def popping(self, *names: str) -> "LayerSpec":
        """Return a copy of this layer that receives values stashed by earlier layers.

        Its forward takes the input, then one argument per name, in order. Each stash is popped by
        one layer.
        """
        return self._with(pops=names)

    def _with(self, **declared: tuple[Any, ...]) -> "LayerSpec":
        spec = LayerSpec(self.factory, *self.args, **self.kwargs)
        for field in ("ties", "stashes", "pops"):
            object.__setattr__(spec, field, declared.get(field, getattr(self, field)))
        return spec

    @property
    def kwargs(self) -> dict[str, Any]:
        """Return a copy of the keyword arguments."""
        return dict(self.keywords)

    @property
    def name(self) -> str:
        """Return the name of the factory, as shown in tables and messages."""
        return factory_name(self.factory)

    def build(self) -> nn.Module:
        """Call the factory; raise `ModelError` if it fails or returns no module."""
        return call_factory(self, where=repr(self))

    def __repr__(self) -> str:
        parts = [self.name, *map(repr, self.args)]
        parts += [f"{key}={value!r}" for key, value in self.keywords]
        return f"LayerSpec({', '.join(parts)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerSpec):
            return NotImplemented
        return (
            self.factory == other.factory
            and _same(self.args, other.args)
            and _same(self.kwargs, other.kwargs)
        )

    def __hash__(self) -> int:
        # Arguments need not be hashable (lists, tensors): only those parts that always are.
        factory = self.factory if isinstance(self.factory, Hashable) else None
        return hash((factory, len(self.args), frozenset(key for key, _ in self.keywords)))


def _same(left: object, right: object) -> bool:
    """Return whether two arguments are equal; tensors compare by dtype, device and all values."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        alike = left.dtype == right.dtype and left.device == right.device
        return alike and torch.equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    try:
        return bool(left == right)
    except (RuntimeError, TypeError, ValueError):
        # Arrays of other libraries compare elementwise: treat them as different.
        return False


Layer = nn.Module | LayerSpec


def factory_name(factory: Callable[..., object]) -> str:
    """Return a short readable name of a factory, including a `functools.partial`."""
    inner = getattr(factory, "func", factory)
    return str(getattr(inner, "__qualname__", type(inner).__name__))


def layer_name(layer: Layer) -> str:
    """Return the name of a layer's factory or module class, as shown in tables."""
    return layer.name if isinstance(layer, LayerSpec) else type(layer).__name__


def call_factory(spec: LayerSpec, where: str) -> nn.Module:
    """Build the module of a spec; raise `ModelError` with the prefix ``where`` if that fails."""
    try:
        module = spec.factory(*spec.args, **spec.kwargs)
    except Exception as error:
        # Remove this frame from the traceback, which should begin in the factory.
        trace = error.__traceback__
        error.__traceback__ = None if trace is None else trace.tb_next
        raise ModelError(
            f"{where}: the factory {spec.name} failed: {words_of(error)}; correct the arguments of "
            f"{spec!r}"
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"{where}: the factory {spec.name} must return an nn.Module, got "
            f"{type(module).__name__}; return a module from the factory of {spec!r}"
        )
    return module


def normalise_layers(model: nn.Sequential | nn.ModuleList | Sequence[Layer]) -> list[Layer]:
    """Return the layers of a model as a list; raise `ModelError` if it is not a sequence of layers.

    A module that occurs twice in an `nn.Sequential` occurs twice in the list.
    """
    layers = _elements(model)
    if not layers:
        raise ModelError("model: the model has no layers; add at least one")
    return [_checked(index, element) for index, element in enumerate(layers)]


def _elements(model: object) -> list[object]:
    if isinstance(model, nn.Sequential | nn.ModuleList):
        return list(model)
    if isinstance(model, nn.Module) and type(model).__module__.startswith("transformers."):
        raise ModelError(
            f"model: a {type(model).__name__} of transformers is one module, not a sequence of "
            f"layers; save it with model.save_pretrained(folder), then pass "
            f"gpipe_hpc.models.huggingface.huggingface_layers(folder), or on the command line "
            f"model=huggingface model.path=folder"
        )
    if isinstance(model, nn.Module):
        raise ModelError(
            f"model: cannot be split into stages, expected nn.Sequential or a sequence of layers, "
            f"got one {type(model).__name__}; pass its parts as nn.Sequential(...)"
        )
    if isinstance(model, Sequence) and not isinstance(model, str | bytes):
        return list(model)
    raise ModelError(
        f"model: not a sequence of layers, expected nn.Sequential or a list of nn.Module and "
        f"LayerSpec, got {type(model).__name__}; put the layers into a list"
    )


def global_name(index: int, name: str) -> str:
    """Return ``layers.<index>.<name>``, the parameter's name in checkpoints and messages."""
    return f"layers.{index}.{name}"


def named_layer_parameters(index: int, layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a built layer with their global names, each once."""
    for name, parameter in layer.named_parameters():
        yield global_name(index, name), parameter


def _checked(index: int, element: object) -> Layer:
    if isinstance(element, nn.Module | LayerSpec):
        return element
    raise _not_a_layer(index, element)


def _not_a_layer(index: int, element: object) -> ModelError:
    if isinstance(element, type) and issubclass(element, nn.Module):
        got = f"the class {element.__name__}"
        remedy = f"write LayerSpec({element.__name__}, ...) or an instance of it"
    elif callable(element):
        got = f"the callable {factory_name(element)}"
        remedy = "put the call into the forward of an nn.Module"
    else:
        got = type(element).__name__
        remedy = "remove it or wrap it in an nn.Module"
    return ModelError(
        f"layers.{index}: not a layer, expected an nn.Module or a LayerSpec, got {got}; {remedy}"
    )
