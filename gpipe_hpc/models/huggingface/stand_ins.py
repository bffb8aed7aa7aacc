"""Placeholders without parameters for the modules of a model that belong to other layers."""

from typing import Any

from torch import Tensor, nn

from gpipe_hpc.models.huggingface.calls import Call
from gpipe_hpc.models.huggingface.structure import LAST


class StandIn(nn.Module):
    """Placeholder for a module that belongs to another layer, with that module's attributes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = (module,)  # in a tuple, so that it is not registered as a submodule

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the replaced module: some models read a block's attention type."""
        return getattr(self.__dict__["_module"][0], name)


class CallRecorder(StandIn):
    """Placeholder for a block that records its arguments and returns unchanged hidden states."""

    def __init__(self, block: nn.Module, calls: list[Any], num_returned: int) -> None:
        super().__init__(block)
        self._calls = calls
        self._num_returned = num_returned

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Record the arguments and return the hidden states."""
        self._calls.append((args, kwargs))
        hidden = Call.of(args, kwargs, "block").hidden
        nothing = (None,) * (self._num_returned - 1)
        return (hidden, *nothing) if self._num_returned else hidden


class ComputedOutput(StandIn):
    """Placeholder for the core of a model that returns hidden states computed by earlier layers."""

    def __init__(self, core: nn.Module, returned: type) -> None:
        super().__init__(core)
        self.returned = returned
        self.hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the given hidden states in the output type of the core."""
        return self.returned(**{LAST: self.hidden})
