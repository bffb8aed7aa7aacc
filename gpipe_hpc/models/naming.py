"""Global names: what a parameter is called whatever stage holds its layer."""

from collections.abc import Iterator

from torch import nn


def global_name(index: int, name: str) -> str:
    """Return ``layers.<index>.<name>``, the name in gradients, checkpoints and messages."""
    return f"layers.{index}.{name}"


def named_layer_parameters(index: int, layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of one built layer under their global names, each once."""
    for name, parameter in layer.named_parameters():
        yield global_name(index, name), parameter
