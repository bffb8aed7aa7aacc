"""The call of a transformers model's block, separated into hidden states and other arguments."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.pytree import Tree, flatten, unflatten

HIDDEN: Final = "hidden_states"
_PLAIN: Final = (Tensor, type(None), bool, int, float, str, torch.dtype, torch.Size)


class Call(NamedTuple):
    """The hidden states and the other arguments of one call of a block."""

    hidden: Tensor
    leaves: list[Any]
    form: "Form"

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> "Call":
        """Separate the hidden states from the arguments; raise `ModelError` if there are none."""
        by_name = not args
        rest = {name: value for name, value in kwargs.items() if not by_name or name != HIDDEN}
        hidden = kwargs.get(HIDDEN) if by_name else args[0]
        if not isinstance(hidden, Tensor):
            raise unknown(
                where,
                "is not called with hidden states as the first argument",
                type(hidden).__name__,
            )
        leaves, tree = flatten((list(args[1:]), rest))
        for leaf in leaves:
            if not isinstance(leaf, _PLAIN):
                raise unknown(where, "is called with an unsupported object", type(leaf).__name__)
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise unknown(
                    where, "is called with further activations that need gradients", "a tensor"
                )
        return cls(hidden, leaves, Form(tree, by_name))


class Form(NamedTuple):
    """Structure of a block's arguments, and whether hidden states are passed by keyword."""

    tree: Tree
    by_name: bool

    def call(self, block: nn.Module, hidden: Tensor, leaves: Sequence[Any]) -> Any:
        """Call a block with hidden states and the leaves of its other arguments."""
        args, kwargs = unflatten(leaves, self.tree)
        if self.by_name:
            return block(*args, **{HIDDEN: hidden}, **kwargs)
        return block(hidden, *args, **kwargs)


def bound(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, including keywords beyond the signature."""
    signature = inspect.signature(function)
    named = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(parameter.name, {})
    return named


def same_values(one: Tensor, other: object) -> bool:
    """Return whether two tensors are the same object or views of the same elements in order."""
    if one is other:
        return True
    if not isinstance(other, Tensor) or other._base is None:
        return False
    root = one if one._base is None else one._base
    return (
        other._base is root
        and other.shape == one.shape
        and other.stride() == one.stride()
        and other.storage_offset() == one.storage_offset()
    )


def unknown(where: str, what: str, got: str) -> ModelError:
    """Return the error for a model that this package cannot split into layers."""
    return ModelError(
        f"huggingface: {where} {what} ({got}); this model cannot be split into layers, which "
        f"requires consecutive blocks, each called with the hidden states and tensors that need "
        f"no gradient: write the model as a sequence of layers"
    )
