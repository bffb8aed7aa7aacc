"""Nests: nested tuples, lists and mappings whose leaves are tensors or other values.

Plain containers are traversed here, because each call of torch's `tree_flatten` leaves reference
cycles that only the garbage collector frees, dozens per step. Containers registered with torch's
pytree are traversed by torch.
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
    """The structure of a nest: its containers without the leaves; hashable and picklable.

    Two trees are equal only if nests built with them are indistinguishable. Keys that Python treats
    as equal (1, True and 1.0; 0.0 and -0.0) differ here, because every key that is not a plain
    string is wrapped in `Key`.
    """

    kind: Any  # None for a leaf, a container's type, or a Registered
    keys: tuple[Any, ...] | None
    children: tuple["Tree", ...]


LEAF = Tree(None, None, ())


@register_boundary_type
class Key:
    """A dict key that is not a plain string; equal only to keys that pickle to the same bytes."""

    __slots__ = ("_bytes", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._bytes = b""  # computed on comparison, because most trees are never compared

    def __eq__(self, other: object) -> bool:
        """Compare type and value bitwise; NaN equals itself."""
        return isinstance(other, Key) and self._exact() == other._exact()

    def __hash__(self) -> int:
        """Return a hash consistent with equality."""
        return hash(self._exact())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a call of the class with the wrapped value."""
        return Key, (self.value,)

    def __repr__(self) -> str:
        """Return the repr of the value."""
        return repr(self.value)

    def _exact(self) -> bytes:
        self._bytes = self._bytes or _exactly(self.value)
        return self._bytes


@register_boundary_type
@dataclass(frozen=True, eq=False)
class Registered:
    """The containers of a nest that are registered with torch's pytree, which traverses them.

    Equal only if they pickle to the same bytes; torch's own comparison ignores differences such as
    the types of keys.
    """

    spec: pytree.TreeSpec

    def __eq__(self, other: object) -> bool:
        """Compare the pickled bytes."""
        return isinstance(other, Registered) and self._exact == other._exact

    def __hash__(self) -> int:
        """Return a hash consistent with equality."""
        return hash(self._exact)

    @cached_property
    def _exact(self) -> bytes:
        return _exactly(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the containers with integers as leaves, because pickling a TreeSpec warns."""
        return _registered, (self.spec.unflatten(range(self.spec.num_leaves)),)


@rebuilds
def _registered(nest: Nest) -> Registered:
    return Registered(pytree.tree_structure(nest))


def _exactly(value: object) -> bytes:
    """Return bytes that identify a value: its pickle, or its address if it cannot be pickled."""
    try:
        return pickle.dumps(value)
    except Exception:  # user classes may raise anything
        return str(id(value)).encode()


def flatten(nest: Nest, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Tree]:
    """Return the leaves of a nest in order, and its structure; the inverse of `unflatten`.

    `is_leaf` returns whether to treat a container as a leaf.
    """
    leaves: list[Any] = []
    return leaves, _walk(nest, leaves, is_leaf)


def unflatten(leaves: Iterable[Any], tree: Tree) -> Nest:
    """Build a nest from leaves and a structure returned by `flatten`."""
    return _build(tree, iter(leaves))


def map_tensors(function: Callable[[torch.Tensor], Any], nest: Nest) -> Nest:
    """Return the nest with `function` applied to each tensor, in new containers.

    `function` is called once for a tensor that occurs several times.
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
    """Return the tensors of a nest in leaf order, without duplicates."""
    if isinstance(nest, torch.Tensor):
        return [nest]
    tensors = [leaf for leaf in flatten(nest)[0] if isinstance(leaf, torch.Tensor)]
    if len(tensors) > 1:
        tensors = list({id(tensor): tensor for tensor in tensors}.values())
    return tensors


def with_dicts(nest: Nest) -> Nest:
    """Return a nest with dicts in place of mappings of other classes, such as BatchEncoding.

    Other processes may not have those classes.
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
    # torch.Size is registered, but would be rebuilt as a tuple, so it is treated as a leaf.
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
    """Traverse a mapping of a user class, such as BatchEncoding; without tensors it is a leaf."""
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
        except TypeError:  # the class has a different constructor
            return items
    return tree.kind(*children) if hasattr(tree.kind, "_fields") else tree.kind(children)
