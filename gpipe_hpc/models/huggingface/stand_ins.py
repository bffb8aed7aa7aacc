"""Modules without parameters that replace modules held by other layers in a copy of a model."""

from typing import Any

from torch import Tensor, nn

from gpipe_hpc.models.huggingface.calls import Call
from gpipe_hpc.models.huggingface.structure import LAST


class StandIn(nn.Module):
    """Replacement of a module that another layer holds; attributes are read from that module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = (module,)  # in a tuple, so that it is not registered as a submodule

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the replaced module; some models read a block's attention type."""
        return getattr(self.__dict__["_module"][0], name)


class CallRecorder(StandIn):
    """Stand-in for a block that records its arguments and returns the hidden states."""

    def __init__(self, block: nn.Module, calls: list[Any], num_returned: int) -> None:
        super().__init__(block)
        self._calls = calls
        self._num_returned = num_returned

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Record a call."""
        self._calls.append((args, kwargs))
        hidden = Call.of(args, kwargs, "block").hidden
        nothing = (None,) * (self._num_returned - 1)
        return (hidden, *nothing) if self._num_returned else hidden


class ComputedOutput(StandIn):
    """Stand-in for the core that returns hidden states computed by earlier layers."""

    def __init__(self, core: nn.Module, returned: type) -> None:
        super().__init__(core)
        self.returned = returned
        self.hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states in the output type of the core."""
        return self.returned(**{LAST: self.hidden})
