"""What a layer is: an `nn.Module`, or a `LayerSpec` that builds one where it is needed."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpipe_hpc.errors import ModelError, words_of


@dataclass(frozen=True, init=False, repr=False, eq=False)
class LayerSpec:
    """A layer described but not built: ``factory(*args, **kwargs)`` returns the module.

    Immutable; picklable if factory and arguments are. Specs are equal if factory and arguments are
    (tensors by value); equal specs are assumed to cost the same.

    Args:
        factory: a class or function that returns an nn.Module.
        args, kwargs: its arguments.
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
                f"LayerSpec: the factory cannot be called to make a layer, expected a class or "
                f"function, got {type(factory).__name__}; write LayerSpec(nn.Linear, 8, 8), or "
                f"put a module that is already built into the sequence as it is"
            )
        object.__setattr__(self, "factory", factory)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "keywords", tuple(kwargs.items()))
        object.__setattr__(self, "ties", ())
        object.__setattr__(self, "stashes", ())
        object.__setattr__(self, "pops", ())

    def tied(self, names: Mapping[str, str]) -> "LayerSpec":
        """Return this layer with tied parameters: name within the layer -> name of the tie.

        All parameters of a tie are one parameter, on any stages, with the initial weights of the
        first.
        """
        return self._with(ties=tuple(names.items()))

    def stashing(self, *names: str) -> "LayerSpec":
        """Return this layer with names of what it stashes for later layers.

        Its forward returns a tuple: the output, then one value per name, in their order.
        """
        return self._with(stashes=names)

    def popping(self, *names: str) -> "LayerSpec":
        """Return this layer with names of what it pops, stashed by earlier layers for it alone.

        Its forward takes the input, then one argument per name, in their order.
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
        """Return the factory's name, as in tables and messages."""
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
    """Say whether two arguments are equal; tensors by type and value, never elementwise."""
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
        # Array-like values of other libraries have no single truth: take them for different.
        return False


Layer = nn.Module | LayerSpec


def factory_name(factory: Callable[..., object]) -> str:
    """Return a short readable name of a factory, also of a `functools.partial`."""
    inner = getattr(factory, "func", factory)
    return str(getattr(inner, "__qualname__", type(inner).__name__))


def layer_name(layer: Layer) -> str:
    """Return a layer's name in tables: that of its factory or module class."""
    return layer.name if isinstance(layer, LayerSpec) else type(layer).__name__


def call_factory(spec: LayerSpec, where: str) -> nn.Module:
    """Build a spec's module; ``where`` begins the message of the `ModelError` if that fails."""
    try:
        module = spec.factory(*spec.args, **spec.kwargs)
    except Exception as error:
        # Where the call itself did not fit, this frame would stand there as the factory's.
        trace = error.__traceback__
        error.__traceback__ = None if trace is None else trace.tb_next
        raise ModelError(
            f"{where}: the factory {spec.name} failed, expected an nn.Module, got "
            f"{words_of(error)}; correct the arguments of {spec!r}"
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"{where}: the factory {spec.name} gave no layer, expected an nn.Module, got "
            f"{type(module).__name__}; return a module from the factory of {spec!r}"
        )
    return module


def normalise_layers(model: nn.Sequential | nn.ModuleList | Sequence[Layer]) -> list[Layer]:
    """Return the model's layers as a list; raise `ModelError` if it is no sequence of layers.

    A module that occurs twice in an `nn.Sequential` occurs twice in the list.
    """
    layers = _elements(model)
    if not layers:
        raise ModelError("model: has no layers, expected at least 1, got 0; add a layer")
    return [_checked(index, element) for index, element in enumerate(layers)]


def _elements(model: object) -> list[object]:
    if isinstance(model, nn.Sequential | nn.ModuleList):
        return list(model)
    if isinstance(model, nn.Module) and type(model).__module__.startswith("transformers."):
        raise ModelError(
            f"model: a {type(model).__name__} of transformers is one module, expected a sequence "
            f"of layers; save it by model.save_pretrained(folder), then give "
            f"gpipe_hpc.models.huggingface.huggingface_layers(folder), or on the command line "
            f"model=huggingface model.path=folder"
        )
    if isinstance(model, nn.Module):
        raise ModelError(
            f"model: cannot be cut into stages, expected nn.Sequential or a sequence of layers, "
            f"got one {type(model).__name__}; give its parts as nn.Sequential(...)"
        )
    if isinstance(model, Sequence) and not isinstance(model, str | bytes):
        return list(model)
    raise ModelError(
        f"model: not a sequence of layers, expected nn.Sequential or a list of nn.Module and "
        f"LayerSpec, got {type(model).__name__}; put the layers into a list"
    )


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
