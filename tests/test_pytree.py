"""Tests of flattening and unflattening nested containers."""

import gc
import pickle
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch

from gpipe_hpc.pytree import LEAF, flatten, map_tensors, tensors_of, unflatten

Pair = namedtuple("Pair", "left right")
T = torch.arange(3)

NESTS = [
    T,
    None,
    7,
    (),
    {},
    (T, None, True),
    [T, [T, (1,)]],
    {"b": T, "a": {"x": None, 3: "text"}},
    OrderedDict(b=T, a=1),
    Pair(T, Pair(1, (T,))),
    defaultdict(list, a=[T]),
    torch.max(torch.ones(2, 2), 0),
    torch.Size([2, 3]),
]


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@pytest.mark.parametrize("nest", NESTS, ids=repr)
def test_flatten_and_back(nest):
    leaves, tree = flatten(nest)
    assert same(unflatten(leaves, tree), nest)
    assert same(unflatten(leaves, pickle.loads(pickle.dumps(tree))), nest)
    assert pickle.loads(pickle.dumps(tree)) == tree
    assert hash(tree) == hash(flatten(nest)[1])


def test_different_containers_have_different_trees():
    nests = [T, (T,), [T], {"a": T}, {"b": T}, Pair(T, T), (T, T), ((T,),), defaultdict(int, a=T)]
    assert len({flatten(nest)[1] for nest in nests}) == len(nests)
    assert flatten(T)[1] == LEAF


def test_tensors_in_leaf_order_and_mapped():
    nest = {"b": (T, None), "a": [T + 1, 5]}
    assert [t[0].item() for t in tensors_of(nest)] == [0, 1]
    mapped = map_tensors(lambda t: t * 2, nest)
    assert mapped["a"][1] == 5 and mapped["a"][0].tolist() == [2, 4, 6]
    assert mapped["b"] is not nest["b"] and map_tensors(lambda t: t, T) is T


def test_a_walk_leaves_no_circle_of_references():
    """Flattening creates no reference cycle; torch's own creates one per call."""
    found = []
    gc.disable()
    try:
        for _ in range(5):  # threads of other tests may create garbage at the same time
            gc.collect()
            for _ in range(10):
                leaves, tree = flatten({"a": (T, [T]), "b": None})
                unflatten(leaves, tree)
            del leaves, tree
            found.append(gc.collect())
        assert min(found) == 0
    finally:
        gc.enable()
