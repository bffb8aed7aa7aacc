"""Global names of parameters, which do not depend on the stage that holds the layer."""

from collections.abc import Iterator

from torch import nn


def global_name(index: int, name: str) -> str:
    """Return ``layers.<index>.<name>``, the parameter's name in checkpoints and messages."""
    return f"layers.{index}.{name}"


def named_layer_parameters(index: int, layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a built layer with their global names, each once."""
    for name, parameter in layer.named_parameters():
        yield global_name(index, name), parameter
