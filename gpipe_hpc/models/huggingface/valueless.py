"""Run a model on the meta device where it asks for values that are not there."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class SayYes(TorchFunctionMode):
    """Answer yes where a model asks whether something holds of tensors on the meta device.

    transformers asks whether all tokens count, and whether all positions are of one sequence, to
    leave out masks that mask nothing.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one function of torch."""
        if func is Tensor.__bool__ and args[0].is_meta and args[0].dtype == torch.bool:
            return True
        return func(*args, **(kwargs or {}))
