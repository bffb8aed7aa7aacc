"""Modules without parameters that stand where a copy of a model has no part of its own."""

from typing import Any

from torch import Tensor, nn

from gpipe_hpc.models.huggingface.calls import Call
from gpipe_hpc.models.huggingface.structure import LAST


class StandIn(nn.Module):
    """Stands where a module is that other layers hold."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = (module,)  # in a tuple: no submodule, its parameters are another layer's

    def __getattr__(self, name: str) -> Any:
        """Answer as the module would: some models ask a block for its kind of attention."""
        return getattr(self.__dict__["_module"][0], name)


class Listener(StandIn):
    """Notes what a block is called with and returns the hidden states."""

    def __init__(self, block: nn.Module, calls: list[Any], num_returned: int) -> None:
        super().__init__(block)
        self._calls = calls
        self._num_returned = num_returned

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Note a call."""
        self._calls.append((args, kwargs))
        hidden = Call.of(args, kwargs, "block").hidden
        nothing = (None,) * (self._num_returned - 1)
        return (hidden, *nothing) if self._num_returned else hidden


class Given(StandIn):
    """Stands where the core is: returns what the layers ahead have computed."""

    def __init__(self, core: nn.Module, returned: type) -> None:
        super().__init__(core)
        self.returned = returned
        self.hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states as the core returns them."""
        return self.returned(**{LAST: self.hidden})
