"""Nests: tuples, lists and mappings, in one another, whose leaves are tensors or other values.

A walk of our own over the plain containers: each call of torch's `tree_flatten` leaves a circle
of references behind that only the garbage collector frees, dozens in a step. Containers that are
registered with torch's pytree are walked by it.
"""

import pickle
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from gpipe_hpc.comm.net.pickling import rebuilds, register_boundary_type
from gpipe_hpc.torch_compat import pytree

Nest = Any
"""A nest of tuples, lists and dicts whose leaves are tensors, None or picklable values."""


class Tree(NamedTuple):
    """The containers of a nest without its leaves; hashable and picklable.

    Trees are equal if nobody can tell what is built with them apart: keys that Python takes for
    equal (1, True and 1.0; 0.0 and -0.0) make different ones, except strings they are `Key`s.
    """

    kind: Any  # None for a leaf, a container's type, or a Registered
    keys: tuple[Any, ...] | None
    children: tuple["Tree", ...]


LEAF = Tree(None, None, ())


@register_boundary_type
class Key:
    """A dict's key that is no plain string: equal to those alone that pickle to the same bytes."""

    __slots__ = ("_bytes", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._bytes = b""  # made when it is compared: most trees never are

    def __eq__(self, other: object) -> bool:
        """Compare by type and value to the bit; NaN equals itself."""
        return isinstance(other, Key) and self._exact() == other._exact()

    def __hash__(self) -> int:
        """Hash as compared."""
        return hash(self._exact())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the value."""
        return Key, (self.value,)

    def __repr__(self) -> str:
        """Return the value's."""
        return repr(self.value)

    def _exact(self) -> bytes:
        self._bytes = self._bytes or _exactly(self.value)
        return self._bytes


@register_boundary_type
@dataclass(frozen=True, eq=False)
class Registered:
    """The containers of a nest that torch's pytree walks.

    Equal to those alone that pickle to the same bytes: what the walk takes for equal may hold
    keys or flags that are not the same.
    """

    spec: pytree.TreeSpec

    def __eq__(self, other: object) -> bool:
        """Compare what is sent of them."""
        return isinstance(other, Registered) and self._exact == other._exact

    def __hash__(self) -> int:
        """Hash as compared."""
        return hash(self._exact)

    @cached_property
    def _exact(self) -> bytes:
        return _exactly(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the containers themselves with numbers for leaves: a TreeSpec warns."""
        return _registered, (self.spec.unflatten(range(self.spec.num_leaves)),)


@rebuilds
def _registered(nest: Nest) -> Registered:
    return Registered(pytree.tree_structure(nest))


def _exactly(value: object) -> bytes:
    """Return what tells a value from all others; its address if it cannot be sent anyway."""
    try:
        return pickle.dumps(value)
    except Exception:  # whatever a class of the user's raises
        return str(id(value)).encode()


def flatten(nest: Nest, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Tree]:
    """Return the leaves of a nest in order, and its containers.

    `is_leaf`: which containers count as leaves, too.
    """
    leaves: list[Any] = []
    return leaves, _walk(nest, leaves, is_leaf)


def unflatten(leaves: Iterable[Any], tree: Tree) -> Nest:
    """Put leaves into containers: the inverse of `flatten`."""
    return _build(tree, iter(leaves))


def map_tensors(function: Callable[[torch.Tensor], Any], nest: Nest) -> Nest:
    """Return the nest with each tensor replaced by `function` of it, in new containers.

    A tensor that occurs several times is replaced by one and the same.
    """
    if isinstance(nest, torch.Tensor):
        return function(nest)
    leaves, tree = flatten(nest)
    made: dict[int, Any] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in made:
            made[id(leaf)] = function(leaf)
    return unflatten([made.get(id(x), x) for x in leaves], tree)


def tensors_of(nest: Nest) -> list[torch.Tensor]:
    """Return the tensors of a nest in leaf order, one that occurs several times once."""
    if isinstance(nest, torch.Tensor):
        return [nest]
    tensors = [leaf for leaf in flatten(nest)[0] if isinstance(leaf, torch.Tensor)]
    if len(tensors) > 1:
        tensors = list({id(tensor): tensor for tensor in tensors}.values())
    return tensors


def with_dicts(nest: Nest) -> Nest:
    """Return a nest with a dict in place of each mapping of another class, as a BatchEncoding.

    Other processes may not know the class.
    """
    leaves, tree = flatten(nest)
    found = [dict(leaf) if isinstance(leaf, UserDict) else leaf for leaf in leaves]
    return unflatten(found, _with_dicts(tree))


def _with_dicts(tree: Tree) -> Tree:
    kind = tree.kind
    if isinstance(kind, type) and issubclass(kind, dict | UserDict) and kind is not OrderedDict:
        kind = dict
    return Tree(kind, tree.keys, tuple([_with_dicts(child) for child in tree.children]))


def _walk(nest: Nest, leaves: list[Any], is_leaf: Callable[[Any], bool] | None) -> Tree:
    kind = type(nest)
    if is_leaf is not None and is_leaf(nest):
        leaves.append(nest)
        return LEAF
    if kind is tuple or kind is list or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return Tree(kind, None, tuple([_walk(child, leaves, is_leaf) for child in nest]))
    if kind is dict or kind is OrderedDict:
        keys = tuple([key if type(key) is str else Key(key) for key in nest])
        children = tuple([_walk(child, leaves, is_leaf) for child in nest.values()])
        return Tree(kind, keys, children)
    # A torch.Size is registered, but comes back as a tuple: better a value.
    if isinstance(nest, torch.Tensor | torch.Size) or pytree.tree_is_leaf(nest):
        if isinstance(nest, dict | UserDict):
            return _walk_mapping(nest, leaves, is_leaf)
        leaves.append(nest)
        return LEAF
    inner, spec = pytree.tree_flatten(nest, is_leaf)
    leaves.extend(inner)
    return Tree(Registered(spec), None, ())


def _walk_mapping(
    nest: "dict[Any, Any] | UserDict[Any, Any]",
    leaves: list[Any],
    is_leaf: Callable[[Any], bool] | None,
) -> Tree:
    """Walk a mapping of a class of its own, as a BatchEncoding; it is a value without tensors."""
    own: list[Any] = []
    children = tuple([_walk(child, own, is_leaf) for child in nest.values()])
    if not any(isinstance(leaf, torch.Tensor) or type(leaf) in (list, tuple) for leaf in own):
        leaves.append(nest)
        return LEAF
    leaves.extend(own)
    return Tree(type(nest), tuple([k if type(k) is str else Key(k) for k in nest]), children)


def _build(tree: Tree, leaves: Iterator[Any]) -> Nest:
    if tree.kind is None:
        return next(leaves)
    if isinstance(tree.kind, Registered):
        spec = tree.kind.spec
        return spec.unflatten([next(leaves) for _ in range(spec.num_leaves)])
    children = [_build(child, leaves) for child in tree.children]
    if tree.keys is not None:
        keys = [key.value if isinstance(key, Key) else key for key in tree.keys]
        items = dict(zip(keys, children, strict=True))
        try:
            return tree.kind(items)
        except TypeError:  # of a class that is made in another way
            return items
    return tree.kind(*children) if hasattr(tree.kind, "_fields") else tree.kind(children)
