"""Long skips: values that a layer stashes for one later layer, on any stages.

Declared by `LayerSpec.stashing` and `LayerSpec.popping`; a built module declares them with
attributes `stashes` and `pops`, tuples of names. Each name belongs to one stash and one pop.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.layers import Layer, layer_name
from gpipe_hpc.pytree import tensors_of


class Skip(NamedTuple):
    """A value that one layer stashes and a later one pops: indices of both layers, and its name."""

    source: int
    destination: int
    name: str


class SkipNames(NamedTuple):
    """Names of the values that a layer stashes and pops, in order of its results and arguments."""

    stashes: tuple[str, ...] = ()
    pops: tuple[str, ...] = ()


def skip_names(layer: Layer, where: str = "layer") -> SkipNames:
    """Return the names that a layer declares; raise `ModelError` if it is not a tuple of names."""
    return SkipNames(_declared(layer, "stashes", where), _declared(layer, "pops", where))


def find_skips(layers: Sequence[Layer]) -> tuple[Skip, ...]:
    """Return the skips of a model, sorted by source layer, then in the order of stashing.

    Raises:
        ModelError: a name is stashed twice, popped twice, never popped, popped without a stash, or
            popped by its own or an earlier layer.
    """
    sources: dict[str, int] = {}
    destinations: dict[str, int] = {}
    for index, layer in enumerate(layers):
        names = skip_names(layer, _where(layers, index))
        for name in names.stashes:
            if name in sources:
                _refuse(layers, index, f"stashes {name!r}", sources[name], "stashed")
            sources[name] = index
        for name in names.pops:
            if name in destinations:
                first = destinations[name]
                _refuse(layers, index, f"pops {name!r}", first, "popped")
            destinations[name] = index
    for name, index in destinations.items():
        if name not in sources:
            raise ModelError(
                f"{_where(layers, index)}: pops {name!r}, but no earlier layer stashes it; correct "
                f"the name, or let a layer stash it"
            )
        if sources[name] >= index:
            raise ModelError(
                f"{_where(layers, index)}: pops {name!r}, but {_where(layers, sources[name])}, "
                f"which stashes it, is not an earlier layer; move the pop after the stash"
            )
    for name, index in sources.items():
        if name not in destinations:
            raise ModelError(
                f"{_where(layers, index)}: stashes {name!r}, but no later layer pops it; let a "
                f"layer pop it, or do not stash it"
            )
    return tuple(Skip(source, destinations[name], name) for name, source in sources.items())


def run_layer(
    module: Callable[..., Any],
    names: SkipNames,
    nest: Any,
    stashed: MutableMapping[str, Any],
    where: str,
) -> Any:
    """Run one layer and return its output; pop its arguments from `stashed` and add its stashes.

    Raises:
        ModelError: a layer that stashes does not return a tuple of the output and one value per
            name, or a layer modifies in place a value that a later layer pops.
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
        # On different stages the layers share no memory, so results would differ.
        raise ModelError(
            f"{where}: modified in place the value that an earlier layer stashed as {changed}; "
            f"stash a copy (x.clone()), or use inplace=False there"
        )
    if not names.stashes:
        return output
    if not isinstance(output, tuple) or len(output) != 1 + len(names.stashes):
        got = f"{len(output)} values" if isinstance(output, tuple) else type(output).__name__
        raise ModelError(
            f"{where}: stashes {', '.join(names.stashes)}, so its forward must return a tuple "
            f"of the output and {len(names.stashes)} more, got {got}; return (output, "
            f"{', '.join(names.stashes)})"
        )
    stashed.update(zip(names.stashes, output[1:], strict=True))
    return output[0]


def run_layers(modules: Mapping[int, nn.Module], layers: Sequence[Layer], nest: Any) -> Any:
    """Run built layers in order, with their skips, as a plain model.

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
            f"{what} = ('name',), or rename the attribute"
        )
    return tuple(map(str, names))


def _refuse_shared(nest: Any, popped: Any, written: Sequence[Tensor], where: str) -> None:
    """Raise if a layer modified memory shared by its input and a value that it pops."""
    memories = [{t.untyped_storage().data_ptr() for t in tensors_of(x)} for x in (nest, popped)]
    if any(t.untyped_storage().data_ptr() in memories[0] & memories[1] for t in written):
        raise ModelError(
            f"{where}: modified its input in place, which shares memory with a value that the "
            f"layer pops; on different stages their memory would be separate; use a copy "
            f"(x.clone())"
        )


def _versions(stashed: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: [t._version for t in tensors_of(nest)] for name, nest in stashed.items()}


def _where(layers: Sequence[Layer], index: int) -> str:
    return f"layers.{index} ({layer_name(layers[index])})"


def _refuse(layers: Sequence[Layer], index: int, what: str, first: int, done: str) -> None:
    raise ModelError(
        f"{_where(layers, index)}: {what}, which is already {done} by "
        f"{_where(layers, first)}; give each skip its own name"
    )
