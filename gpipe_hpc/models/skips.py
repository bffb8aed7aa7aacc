"""Long skips: what a layer stashes for one later layer, wherever a cut places the two.

Declared by `LayerSpec.stashing` and `LayerSpec.popping`; a module that comes built declares them
by attributes `stashes` and `pops`, tuples of names. A name belongs to one stash and one pop.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.layers import Layer, layer_name
from gpipe_hpc.pytree import tensors_of


class Skip(NamedTuple):
    """A stash and its pop: the indices of the two layers."""

    source: int
    destination: int
    name: str


class SkipNames(NamedTuple):
    """Names that a layer stashes and pops, in the order of its results and arguments."""

    stashes: tuple[str, ...] = ()
    pops: tuple[str, ...] = ()


def skip_names(layer: Layer, where: str = "layer") -> SkipNames:
    """Return what a layer declares; raise `ModelError` if it is no tuple of names."""
    return SkipNames(_declared(layer, "stashes", where), _declared(layer, "pops", where))


def find_skips(layers: Sequence[Layer]) -> tuple[Skip, ...]:
    """Return the skips of a model, by source, then in the order of stashing.

    Raises `ModelError` with the layers for a stash that is never popped, popped twice, stashed
    twice, or popped by its own or an earlier layer, and for a pop without a stash.
    """
    sources: dict[str, int] = {}
    destinations: dict[str, int] = {}
    for index, layer in enumerate(layers):
        names = skip_names(layer, _where(layers, index))
        for name in names.stashes:
            if name in sources:
                _refuse(layers, index, f"stashes {name!r}", "a new name", sources[name], "stashed")
            sources[name] = index
        for name in names.pops:
            if name in destinations:
                first = destinations[name]
                _refuse(layers, index, f"pops {name!r}", "one pop of a stash", first, "popped")
            destinations[name] = index
    for name, index in destinations.items():
        if name not in sources:
            raise ModelError(
                f"{_where(layers, index)}: pops {name!r}, expected a layer ahead of it that "
                f"stashes it, got none; correct the name, or let a layer stash it"
            )
        if sources[name] >= index:
            raise ModelError(
                f"{_where(layers, index)}: pops {name!r}, expected it from a layer ahead of it, "
                f"got it from {_where(layers, sources[name])}; move the pop behind the stash"
            )
    for name, index in sources.items():
        if name not in destinations:
            raise ModelError(
                f"{_where(layers, index)}: stashes {name!r}, expected a layer behind it that pops "
                f"it, got none; let a layer pop it, or do not stash it"
            )
    return tuple(Skip(source, destinations[name], name) for name, source in sources.items())


def run_layer(
    module: Callable[..., Any],
    names: SkipNames,
    nest: Any,
    stashed: MutableMapping[str, Any],
    where: str,
) -> Any:
    """Run one layer and return its output; take its pops from `stashed` and add its stashes.

    Raises `ModelError` if a stashing layer does not return a tuple with one value per name besides
    the output, or if a layer writes in place to what a later one pops.
    """
    if not (stashed or names.stashes or names.pops):
        return module(nest)
    popped = [stashed.pop(name) for name in names.pops]
    before = _versions(stashed)
    given = [(t, t._version) for t in tensors_of((nest, popped))] if popped else []
    output = module(nest, *popped)
    if any(tensor._version != version for tensor, version in given):
        _refuse_shared(nest, popped, [t for t, version in given if t._version != version], where)
    if before != (after := _versions(stashed)):
        changed = ", ".join(name for name in after if after[name] != before[name])
        # Where a cut lies between the two layers they share no memory: other numbers.
        raise ModelError(
            f"{where}: wrote in place into what an earlier layer stashed as {changed}, expected "
            f"that to stay as it was, got it changed; stash a copy (x.clone()), or use "
            f"inplace=False there"
        )
    if not names.stashes:
        return output
    if not isinstance(output, tuple) or len(output) != 1 + len(names.stashes):
        got = f"{len(output)} values" if isinstance(output, tuple) else type(output).__name__
        raise ModelError(
            f"{where}: stashes {', '.join(names.stashes)}, expected its forward to return a tuple "
            f"of the output and {len(names.stashes)} more, got {got}; return (output, "
            f"{', '.join(names.stashes)})"
        )
    stashed.update(zip(names.stashes, output[1:], strict=True))
    return output[0]


def run_layers(modules: Mapping[int, nn.Module], layers: Sequence[Layer], nest: Any) -> Any:
    """Run built layers in order, skips included, as a plain model.

    `modules` maps indices of `layers`, which declare the skips, to the built modules.
    """
    stashed: dict[str, Any] = {}
    for index, module in sorted(modules.items()):
        where = _where(layers, index)
        nest = run_layer(module, skip_names(layers[index], where), nest, stashed, where)
    return nest


def _declared(layer: Layer, what: str, where: str) -> tuple[str, ...]:
    names = getattr(layer, what, ())
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ModelError(
            f"{where}: bad {what}, expected a tuple of names, got {type(names).__name__}; write "
            f"{what} = ('name',), or call the attribute otherwise"
        )
    return tuple(map(str, names))


def _refuse_shared(nest: Any, popped: Any, written: Sequence[Tensor], where: str) -> None:
    """Refuse a write in place into memory that a layer's input and what it pops have in common."""
    memories = [{t.untyped_storage().data_ptr() for t in tensors_of(x)} for x in (nest, popped)]
    if any(t.untyped_storage().data_ptr() in memories[0] & memories[1] for t in written):
        raise ModelError(
            f"{where}: wrote in place into its input, which is also what it pops, expected the two "
            f"to stay apart, as they are where a cut lies between; use a copy (x.clone())"
        )


def _versions(stashed: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: [t._version for t in tensors_of(nest)] for name, nest in stashed.items()}


def _where(layers: Sequence[Layer], index: int) -> str:
    return f"layers.{index} ({layer_name(layers[index])})"


def _refuse(
    layers: Sequence[Layer], index: int, what: str, expected: str, first: int, done: str
) -> None:
    raise ModelError(
        f"{_where(layers, index)}: {what}, expected {expected}, got one {done} by "
        f"{_where(layers, first)} already; give each skip a name of its own"
    )
