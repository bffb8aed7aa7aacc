"""Global names: what a parameter is called whatever stage holds its layer."""

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.layers import Layer


def global_name(index: int, name: str) -> str:
    """Return ``layers.<index>.<name>``, the name in gradients, checkpoints and messages."""
    return f"layers.{index}.{name}"


def named_layer_parameters(index: int, layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of one built layer under their global names, each once."""
    for name, parameter in layer.named_parameters():
        yield global_name(index, name), parameter


def shared_parameters(
    layers: Sequence[Layer] | Iterable[tuple[int, nn.Module]],
) -> list[tuple[str, str]]:
    """Return the pairs of global names under which built layers share one parameter.

    Takes the whole model, or ``(index, module)`` pairs of the layers built on this rank. The
    first name of a pair is the parameter's first place. Sharing inside one layer is no pair.
    """
    first: dict[int, tuple[int, str]] = {}
    pairs: list[tuple[str, str]] = []
    for position, element in enumerate(layers):
        index, layer = element if isinstance(element, tuple) else (position, element)
        if not isinstance(layer, nn.Module):
            continue
        for name, parameter in named_layer_parameters(index, layer):
            owner, owner_name = first.setdefault(id(parameter), (index, name))
            if owner != index:
                pairs.append((owner_name, name))
    return pairs


def refuse_shared_parameters(layers: Sequence[Layer] | Iterable[tuple[int, nn.Module]]) -> None:
    """Raise `ModelError` when two layers share a parameter: the cut would silently untie them."""
    pairs = shared_parameters(layers)
    if pairs:
        shown = ", ".join(f"{first} = {second}" for first, second in pairs[:4])
        more = f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""
        raise ModelError(
            f"model: layers share parameters, expected each parameter in one layer, got {shown}"
            f"{more}; give each layer its own parameter, or put the sharing layers into one layer"
        )
