"""Gradients: flat buckets where replicas are summed over, tensors of their own where not."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from gpipe_hpc.comm.group import Group, Pending


class Bucket:
    """The gradients of parameters of one dtype in one flat buffer.

    Autograd accumulates into views of it in place. Each view has a version counter of its own,
    which tells whether a micro-batch has used the parameter: no hook runs for that.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        first = parameters[0]
        self.parameters = parameters
        self._flat = torch.zeros(
            sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device
        )
        self._views: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._pending: Pending | None = None

    def clear(self) -> None:
        """Set all gradients to zero and hand the views to the parameters."""
        self._flat.zero_()
        parts = torch.split(self._flat, [p.numel() for p in self.parameters])
        # `.data` gives each view a version counter of its own; plain views would share one.
        self._views = [part.data.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]
        self._versions = [view._version for view in self._views]
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def own(self) -> None:
        """Do nothing: the memory is the bucket's."""

    def used(self) -> list[bool]:
        """Say of each parameter whether a micro-batch of this replica has used it."""
        return [
            parameter.grad is not view or view._version != version
            for parameter, view, version in zip(
                self.parameters, self._views, self._versions, strict=True
            )
        ]

    def start_reduction(self, group: Group) -> None:
        """Start summing the buffer over the replicas."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is not view and parameter.grad is not None:
                view.copy_(parameter.grad)  # a hook of the user's put another tensor there
                parameter.grad = view
        self._pending = group.start_all_reduce(self._flat) if group.size > 1 else None

    def finish(self, divisor: torch.Tensor, used: list[bool]) -> None:
        """Wait for the sum, divide it, and leave None where no replica used the parameter."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self._flat.div_(divisor)
        for parameter, view, is_used in zip(self.parameters, self._views, used, strict=True):
            parameter.grad = view if is_used else None


class Unreduced:
    """The gradients of parameters of one dtype that no other rank adds to.

    None takes memory before the first backward has made it: a schedule that keeps all
    micro-batches holds the most just before that.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self._without: list[nn.Parameter] = []

    def clear(self) -> None:
        """Let go of the last step's gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        self._without = self.parameters

    def own(self) -> None:
        """Copy gradients that have just come.

        Autograd may take what a backward function returns as it is. Its memory may also be that of
        another parameter's gradient, or of one that is on its way to another stage: of a sum
        of two views both get the same. The next micro-batch adds in place.
        """
        come = [parameter for parameter in self._without if parameter.grad is not None]
        if not come:
            return
        self._without = [parameter for parameter in self._without if parameter.grad is None]
        for parameter in come:
            assert parameter.grad is not None, "only these were chosen"
            is_sparse = parameter.grad.is_sparse  # a bucket's are dense, too
            parameter.grad = parameter.grad.to_dense() if is_sparse else parameter.grad.clone()

    def used(self) -> list[bool]:
        """Say of each parameter whether a micro-batch has used it."""
        return [parameter.grad is not None for parameter in self.parameters]

    def start_reduction(self, group: Group) -> None:
        """Check that there is nothing to sum."""
        assert group.size == 1, f"the stage's gradients are summed over {group.size} ranks"

    def finish(self, divisor: torch.Tensor, used: list[bool]) -> None:
        """Divide the gradients."""
        pairs = zip(self.parameters, used, strict=True)
        present = [p.grad for p, is_used in pairs if is_used and p.grad is not None]
        if present:
            torch._foreach_div_(present, divisor)


class StageGradients:
    """The gradients of one stage, by dtype and device of its trainable parameters."""

    def __init__(self, named_parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = list(named_parameters.values())
        self._trained: list[bool] = []
        self.buckets: list[Bucket] | list[Unreduced] = []
        self._used: list[list[bool]] = []

    def clear(self, group: Group) -> None:
        """Begin a step whose gradients are summed over `group`.

        Buckets are made anew if parameters were frozen or unfrozen.
        """
        trained = [p.requires_grad for p in self._parameters]
        if trained != self._trained:
            self._trained = trained
            kinds = _by_kind(p for p in self._parameters if p.requires_grad)
            self.buckets = (
                [Bucket(k) for k in kinds] if group.size > 1 else [Unreduced(k) for k in kinds]
            )
        for parameter in self._parameters:
            if not parameter.requires_grad:
                parameter.grad = None
        for bucket in self.buckets:
            bucket.clear()

    def own(self) -> None:
        """Make gradients that a call of autograd has just made this stage's own."""
        for bucket in self.buckets:
            bucket.own()

    def start_reduction(self, group: Group) -> None:
        """Start the reduction of every bucket; the stage's last contribution has come."""
        self._used = [bucket.used() for bucket in self.buckets]
        for bucket in self.buckets:
            bucket.start_reduction(group)

    def used_flags(self) -> list[bool]:
        """Return which trainable parameters this replica used, bucket by bucket."""
        return [flag for bucket in self._used for flag in bucket]

    def finish(self, divisor: torch.Tensor, used: list[bool]) -> None:
        """Finish every bucket; `used` is `used_flags` united over the replicas."""
        start = 0
        for bucket in self.buckets:
            stop = start + len(bucket.parameters)
            bucket.finish(divisor.to(device=bucket.parameters[0].device), used[start:stop])
            start = stop


def _by_kind(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(by_kind.values())


def unite_flags(flags: list[bool], group: Group) -> list[bool]:
    """Return flags that are set on any rank of the group. Host memory only: no device waits."""
    if group.size == 1 or not flags:
        return flags
    counts = torch.tensor(flags, dtype=torch.int32)
    group.all_reduce(counts)
    return [count > 0 for count in counts.tolist()]
