"""BatchNorm that normalises each micro-batch separately; running statistics use the whole batch.

Within a pipeline, these layers do not update their running statistics but report the moments of
each micro-batch (`Moments`); the pipeline pools all micro-batches of a step. Outside of a pipeline
they behave as torch's layers. If `torch.utils.checkpoint` inside a layer runs a forward again
during the backward, in any thread, the layer normalises as in the first forward and reports
nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.layers import Layer
from gpipe_hpc.models.reports import current_reports
from gpipe_hpc.torch_compat import NormBase, current_graph_task_id

SumOver = Callable[[Tensor], None]
"""A function that all-reduces a tensor in place over the replicas that normalise together."""


class Moments(NamedTuple):
    """Statistics of a layer's channels over one micro-batch.

    `num_values` is the number of values per channel; `mean` and `squares` (sum of squared
    deviations from the mean) have shape (channels,).
    """

    num_values: int
    mean: Tensor
    squares: Tensor


class PipelineStep:
    """State shared by the BatchNorm layers of a pipeline: whether a step is running.

    Running statistics do not change within a step. `sum_over` all-reduces over the replicas that
    normalise together in the current step; None if each replica normalises by itself.
    """

    __slots__ = ("is_active", "sum_over")

    def __init__(self) -> None:
        self.is_active = False
        self.sum_over: SumOver | None = None

    def begin(self) -> None:
        """Mark the start of a step."""
        self.is_active = True

    def end(self) -> None:
        """Mark the end of a step."""
        self.is_active, self.sum_over = False, None


_OUTSIDE: Final = PipelineStep()  # shared by layers that belong to no pipeline; never active


# Set while a micro-batch runs, in the thread that runs it.
_TOGETHER: Final[ContextVar[SumOver | None]] = ContextVar("gpipe_hpc_normalise", default=None)


@contextmanager
def normalising_together(sum_over: SumOver) -> Iterator[None]:
    """Context in which BatchNorm layers use statistics over all replicas that enter it.

    `sum_over` is called once in the forward of each layer and once in its backward.
    """
    token = _TOGETHER.set(sum_over)
    try:
        yield
    finally:
        _TOGETHER.reset(token)


class BatchNorm1d(nn.BatchNorm1d):
    """An `nn.BatchNorm1d` that reports its statistics within a pipeline."""

    place: str = ""
    within: PipelineStep = _OUTSIDE

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a tensor of shape (samples, channels) or (samples, channels, length)."""
        return _forward(self, input, super().forward)


class BatchNorm2d(nn.BatchNorm2d):
    """An `nn.BatchNorm2d` that reports its statistics within a pipeline."""

    place: str = ""
    within: PipelineStep = _OUTSIDE

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a tensor of shape (samples, channels, height, width)."""
        return _forward(self, input, super().forward)


class BatchNorm3d(nn.BatchNorm3d):
    """An `nn.BatchNorm3d` that reports its statistics within a pipeline."""

    place: str = ""
    within: PipelineStep = _OUTSIDE

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a tensor of shape (samples, channels, depth, height, width)."""
        return _forward(self, input, super().forward)


PooledBatchNorm = BatchNorm1d | BatchNorm2d | BatchNorm3d
"""BatchNorm layers that report their statistics.

`place` is the layer's name in messages; `within` is the state of the pipeline's current step."""

_OURS: Final[Mapping[type[nn.Module], type[nn.Module]]] = MappingProxyType(
    {
        nn.BatchNorm1d: BatchNorm1d,
        nn.BatchNorm2d: BatchNorm2d,
        nn.BatchNorm3d: BatchNorm3d,
    }
)


class Conversion(NamedTuple):
    """Result of `convert_batchnorm`: names of the converted modules and of those left unchanged."""

    converted: tuple[str, ...]
    left: tuple[str, ...]

    @classmethod
    def of(cls, parts: Iterable["Conversion"]) -> "Conversion":
        """Concatenate several results."""
        converted, left = zip(*parts, strict=True) if (parts := tuple(parts)) else ((), ())
        return cls(sum(converted, ()), sum(left, ()))


def convert_batchnorm(module: nn.Module, where: str = "") -> Conversion:
    """Convert every plain `nn.BatchNorm*d` in a module, or the module itself, in place.

    The object keeps its identity, parameters, buffers, hooks and flags. Users' subclasses that
    track statistics are left unchanged; they treat each micro-batch as a batch. Returned names are
    prefixed with `where`.

    Raises:
        ModelError: the module contains `nn.SyncBatchNorm`, which would wait for ranks that hold
            other stages.
    """
    converted, left = [], []
    for name, part in module.named_modules():
        full = ".".join(filter(None, (where, name)))
        if isinstance(part, nn.SyncBatchNorm):
            raise ModelError(
                f"{full or 'model'}: SyncBatchNorm is not supported, because ranks of other stages "
                f"do not run the layer; use nn.BatchNorm1d, 2d or 3d with "
                f"normalise_over_replicas=True"
            )
        ours = _OURS.get(type(part))
        if ours is not None:
            # Only the class changes, so that references to the object stay valid.
            part.__class__ = ours
        if isinstance(part, PooledBatchNorm):
            part.place = full
            converted.append(full)
        elif isinstance(part, NormBase) and part.track_running_stats:
            left.append(f"{full} ({type(part).__name__})")
    return Conversion(tuple(converted), tuple(left))


def refuse_shared_statistics(layers: Sequence[Layer]) -> None:
    """Raise ModelError if built layers share a module with running statistics.

    The layers may be placed on different ranks, each of which would have its own statistics.
    """
    places: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for name, part in layer.named_modules() if isinstance(layer, nn.Module) else ():
            if not (isinstance(part, NormBase) and part.track_running_stats and part.training):
                continue
            first = places.setdefault(id(part), index)
            if first != index:
                where = ".".join(filter(None, (f"layers.{index}", name)))
                raise ModelError(
                    f"{where} ({type(part).__name__}): is the same module as in layers.{first}, so "
                    f"both would share running statistics; use a separate module in each layer "
                    f"(weights may be tied), or track_running_stats=False"
                )


def refuse_single_values(layer: PooledBatchNorm, input: Tensor) -> None:
    """Raise ModelError if a micro-batch has fewer than two values per channel."""
    if input.numel() < 2 * input.shape[1]:
        raise ModelError(
            f"{layer.place or 'layer'} ({type(layer).__name__}): expected at least 2 values per "
            f"channel to normalise, got a micro-batch of shape {tuple(input.shape)}; use larger "
            f"batches, fewer micro-batches or replicas, or normalise_over_replicas=True"
        )


def _forward(layer: PooledBatchNorm, input: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor:
    reports = None if _is_rerun() else current_reports()
    measures = reports is not None or layer.within.is_active
    if not (measures and (layer.training or layer.running_mean is None)):
        return plain(input)
    layer._check_input_dim(input)
    sum_over = _sum_over(layer, reports is not None) if layer.training else None
    if sum_over is not None:
        output, moments = _normalised_together(layer, input, sum_over)
    else:
        output, moments = _normalised_alone(layer, input)
    if reports is not None and layer.training and moments is not None:
        reports.statistics.append((layer, moments))
    return output


def _is_rerun() -> bool:
    """Return whether this forward is a recomputation, which runs within a backward."""
    return not torch.compiler.is_compiling() and current_graph_task_id() != -1


def _sum_over(layer: PooledBatchNorm, is_first: bool) -> SumOver | None:
    """Return the function that all-reduces a layer's statistics, or None if replicas are separate.

    A recomputed forward (`is_first` is False) uses the function of the first forward.
    """
    if not is_first:
        return layer.within.sum_over
    sum_over = _TOGETHER.get()
    if layer.within.is_active:
        layer.within.sum_over = sum_over
    return sum_over


def _normalised_alone(layer: PooledBatchNorm, input: Tensor) -> tuple[Tensor, Moments | None]:
    refuse_single_values(layer, input)
    weight, bias, eps = layer.weight, layer.bias, layer.eps
    if layer.running_mean is None:
        return F.batch_norm(input, None, None, weight, bias, True, 0.0, eps), None
    count = input.numel() // input.shape[1]
    # One kernel normalises and measures: with momentum 1 the old statistics are discarded.
    mean, variance = (layer.running_mean.new_zeros(input.shape[1]) for _ in range(2))
    output = F.batch_norm(input, mean, variance, weight, bias, True, 1.0, eps)
    return output, Moments(count, mean, variance.double() * (count - 1))


def _normalised_together(
    layer: PooledBatchNorm, input: Tensor, sum_over: SumOver
) -> tuple[Tensor, Moments | None]:
    """Normalise with mean and variance over all replicas that run this forward together."""
    with torch.no_grad():
        dims = _reduced(input)
        own = Moments(
            input.numel() // input.shape[1],
            *_mean_and_squares(input.detach().to(_computing(input.dtype)), dims),
        )
        # Use a common shift: sums of squares around zero would suffer from cancellation.
        sums = shifted_sums([own], layer.running_mean)
        sum_over(sums)
        mean, squares, count = pooled(sums, layer.running_mean)
        scale = torch.rsqrt(squares / count + layer.eps)
    function: Any = _Normalise.apply
    output = function(input, layer.weight, layer.bias, mean, scale, count, sum_over)
    return output, None if layer.running_mean is None else own


def shifted_sums(moments: list[Moments], shift: Tensor | None) -> Tensor:
    """Return float64[1 + 2 x channels]: count, sums and sums of squares around `shift` (or 0).

    Sums with the same shift may be added; `pooled` converts them to mean and variance.
    """
    means = torch.stack([each.mean.double() for each in moments])
    squares = torch.stack([each.squares.double() for each in moments])
    counts = _column([each.num_values for each in moments], means)
    apart = means if shift is None else means - shift.double()
    sums = [counts.sum(0), (counts * apart).sum(0), (squares + counts * apart.square()).sum(0)]
    return torch.cat(sums)


def _column(numbers: Sequence[int], like: Tensor) -> Tensor:
    """Return host integers as a column tensor on the device, without a host-to-device copy.

    A copy would synchronise. Micro-batches differ in size by at most one sample, so equal numbers
    are consecutive.
    """
    runs = [like.new_full((len(list(run)), 1), number) for number, run in groupby(numbers)]
    return runs[0] if len(runs) == 1 else torch.cat(runs)


def pooled(sums: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Convert `shifted_sums` to mean, sum of squared deviations from it, and count.

    Without values, the mean is NaN and the others are 0.
    """
    count, (total, squares) = sums[0], sums[1:].view(2, -1)
    apart = total / count
    mean = apart if shift is None else apart + shift.double()
    return mean, (squares - total * torch.nan_to_num(apart)).clamp_min(0), count


def _mean_and_squares(input: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(input, dims, correction=0)
    return mean, variance.double() * (input.numel() // input.shape[1])


def _reduced(input: Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


def _computing(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Normalise(torch.autograd.Function):
    """Compute (input - mean) x scale x weight + bias, where mean and scale depend on all inputs.

    The backward follows Ioffe and Szegedy, Batch normalization, 2015, section 3, with sums over all
    inputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        scale: Tensor,
        count: Tensor,
        sum_over: SumOver,
    ) -> Tensor:
        kind = _computing(input.dtype)
        shape = [1, -1, *[1] * (input.dim() - 2)]
        ctx.shape, ctx.sum_over = shape, sum_over
        mean, scale = mean.to(kind).view(shape), scale.to(kind).view(shape)
        ctx.save_for_backward(input, weight, mean, scale, count)
        output = (input.to(kind) - mean) * scale
        if weight is not None:
            output = output * weight.to(kind).view(shape)
        if bias is not None:
            output = output + bias.to(kind).view(shape)
        return output.to(input.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        input, weight, mean, scale, count = ctx.saved_tensors
        kind, dims = _computing(input.dtype), _reduced(input)
        given = gradient.to(kind)
        normal = (input.to(kind) - mean) * scale
        sums = torch.stack([given.sum(dims), (given * normal).sum(dims)])
        bias_gradient, weight_gradient = sums
        input_gradient = None
        if ctx.needs_input_grad[0]:
            factor = scale if weight is None else scale * weight.to(kind).view(ctx.shape)
            whole = sums.to(torch.float64, copy=True)
            ctx.sum_over(whole)
            means = (whole / count).to(kind).view(2, *ctx.shape)
            input_gradient = ((given - means[0] - normal * means[1]) * factor).to(input.dtype)
        needs = ctx.needs_input_grad
        return (
            input_gradient,
            weight_gradient.to(weight.dtype) if needs[1] else None,
            bias_gradient.to(weight.dtype) if needs[2] else None,
            *[None] * 4,
        )
