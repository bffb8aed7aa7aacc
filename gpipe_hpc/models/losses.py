"""Loss functions for a pipeline: ``loss_fn(output, target)``.

A loss returns the mean over the samples of a micro-batch, or a pair (sum, weight) of a 0-dim tensor
and a tensor or number. (A Python number is not copied to the device, which would synchronise.) The
pipeline adds sums and weights over the global batch and divides once. With a pair, micro-batches
may therefore have unequal weights (ignored tokens, uneven batches) and the result still equals that
of the whole batch. Metrics, returned as a third value, are reduced likewise. Weights here are
counts, which are exact at any size.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from types import MappingProxyType, MethodType
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpipe_hpc.errors import ModelError

LossFunction = Callable[[Any, Any], Any]
"""Takes (output, target) of a micro-batch; returns the mean over its samples, or (sum, weight).

As a third value it may return metrics: a dict of name -> (sum, weight), or of name -> a mean. Of
torch's own losses the reduction is known: whatever it is, the loss is that of the whole batch.
"""

Metrics = dict[str, tuple[Tensor, Tensor]]


def token_cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy in nats and the number of tokens that are not ignored.

    ``logits`` has shape [..., V]; ``targets`` [...] are class indices, of which ``ignore_index`` is
    ignored. 16-bit logits are summed in float32.
    """
    if logits.shape[:-1] != targets.shape:
        raise ModelError(
            f"token_cross_entropy: shapes do not match, expected targets of shape "
            f"{list(logits.shape[:-1])} for logits of shape {list(logits.shape)}, got "
            f"{list(targets.shape)}; remove the target's class dimension or reshape the output"
        )
    flat = targets.flatten()
    total = F.cross_entropy(
        _at_least_float32(logits).flatten(0, -2), flat, reduction="sum", ignore_index=ignore_index
    )
    return total, (flat != ignore_index).sum()


def causal_lm(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of next-token prediction and the number of counted tokens.

    ``logits`` has shape [B, S, V]. ``labels`` [B, S] are not shifted, as in transformers: position
    i predicts label i + 1. Labels equal to ``ignore_index`` are ignored. If targets are already
    shifted, as in gpipe_hpc's own data sets, use `token_cross_entropy`.
    """
    if logits.shape[:-1] != labels.shape or labels.dim() != 2:
        raise ModelError(
            f"causal_lm: shapes do not match, expected labels of shape {list(logits.shape[:-1])} "
            f"for logits of shape {list(logits.shape)}, got {list(labels.shape)}; pass the input "
            f"tokens as labels"
        )
    return token_cross_entropy(logits[:, :-1], labels[:, 1:], ignore_index)


def classification(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Metrics]:
    """Return the summed cross-entropy in nats, the number of samples, and the accuracy.

    ``logits`` has shape [B, C]; ``targets`` [B] are class indices, of which -100 is ignored.
    """
    total, num_samples = token_cross_entropy(logits, targets)
    num_right = (logits.detach().argmax(-1) == targets).sum()
    return total, num_samples, {"accuracy": (num_right, num_samples)}


def classification_with_auxiliary(
    outputs: Tensor | tuple[Tensor, ...], targets: Tensor, weight: float = 0.3
) -> tuple[Tensor, Tensor, Metrics]:
    """Return the summed loss with auxiliary heads, the number of samples, the accuracy.

    ``outputs`` are the logits [B, C], alone or followed by those of each auxiliary head, whose
    cross-entropy is weighted by ``weight`` (0.3 in Szegedy et al., Going deeper with convolutions,
    2015). Targets are those of `classification`.
    """
    logits, *heads = (outputs,) if isinstance(outputs, Tensor) else outputs
    total, num_samples, metrics = classification(logits, targets)
    for head in heads:
        total = total + weight * token_cross_entropy(head, targets)[0]
    return total, num_samples, metrics


def segmentation(
    logits: Tensor, masks: Tensor, ignore_index: int = -100
) -> tuple[Tensor, Tensor, Metrics]:
    """Return the summed cross-entropy in nats, the number of counted pixels, and the accuracy.

    ``logits`` has shape [B, C, H, W]; ``masks`` [B, H, W] are class indices, of which
    ``ignore_index`` is ignored. With C = 1, masks are 0 or 1, and the logit is that of class 1.
    """
    expected = [logits.shape[0], *logits.shape[2:]]
    if logits.ndim != 4 or list(masks.shape) != expected:
        raise ModelError(
            f"segmentation: shapes do not match, expected logits [B, C, H, W] and masks [B, H, W], "
            f"got {list(logits.shape)} and {list(masks.shape)}; pass one class for each pixel"
        )
    if logits.shape[1] == 1:
        # Two classes; class 0 has logit 0.
        logits = F.pad(logits, (0, 0, 0, 0, 1, 0))
    total, num_pixels = token_cross_entropy(logits.movedim(1, -1), masks, ignore_index)
    num_right = (logits.detach().argmax(1) == masks).sum()
    return total, num_pixels, {"accuracy": (num_right, num_pixels)}


def bert_pretraining(
    outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor], ignore_index: int = -100
) -> tuple[Tensor, float]:
    """Return the sum over samples of both BERT losses in nats, and the number of samples.

    ``outputs`` are token logits [B, S, V] and next-sentence logits [B, 2]; ``targets`` are the
    masked tokens [B, S], ``ignore_index`` elsewhere, and 0 or 1 per sample [B]. A sample
    contributes the mean over its masked tokens plus its next-sentence loss. If all samples have
    equally many masked tokens, as in BERT, this equals the mean over all masked tokens.
    """
    (token_logits, sentence_logits), (tokens, sentences) = outputs, targets
    expected = [list(token_logits.shape[:2]), list(sentence_logits.shape[:1])]
    if [list(tokens.shape), list(sentences.shape)] != expected:
        raise ModelError(
            f"bert_pretraining: shapes do not match, expected targets of shapes {expected[0]} and "
            f"{expected[1]}, got {list(tokens.shape)} and {list(sentences.shape)}; pass the masked "
            f"tokens and one next-sentence class per sample"
        )
    losses = F.cross_entropy(
        _at_least_float32(token_logits).transpose(1, 2),
        tokens,
        reduction="none",
        ignore_index=ignore_index,
    )
    num_masked = (tokens != ignore_index).sum(1)
    masked = (losses.sum(1) / num_masked.clamp(min=1)).sum()
    sentence = F.cross_entropy(_at_least_float32(sentence_logits), sentences, reduction="sum")
    return masked + sentence, float(len(tokens))


def mean_squared_error(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """Return the sum of squared differences and the number of elements; shapes must be equal."""
    if output.shape != target.shape:
        # Broadcasting would silently compute a wrong loss.
        raise ModelError(
            f"mean_squared_error: shapes do not match, expected a target of shape "
            f"{list(output.shape)}, got {list(target.shape)}; {_reshape(output, target)}"
        )
    total = F.mse_loss(_at_least_float32(output), _at_least_float32(target), reduction="sum")
    return total, float(output.numel())


def _reshape(output: Tensor, target: Tensor) -> str:
    """Return advice for an error message on how to make the shapes of output and target equal."""
    if target.ndim == output.ndim - 1 and output.shape[-1] > 1:
        return (
            "if the targets are classes, convert them to integers with targets.long() (on the "
            "command line with data=arrays data.targets_dtype=int64); otherwise give the last "
            "layer one output, or reshape"
        )
    if target.shape == output.shape[:-1]:
        return "store the targets as array[:, None], or end the model with nn.Flatten(0)"
    return "reshape one of the two"


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


_LOSSES: Final[Mapping[str, LossFunction]] = MappingProxyType(
    {
        "bert_pretraining": bert_pretraining,
        "causal_lm": causal_lm,
        "classification": classification,
        "classification_with_auxiliary": classification_with_auxiliary,
        "mean_squared_error": mean_squared_error,
        "segmentation": segmentation,
        "token_cross_entropy": token_cross_entropy,
    }
)


def loss_function(name: str) -> LossFunction:
    """Return a loss function by name; raise `ModelError` for an unknown name."""
    if name not in _LOSSES:
        raise ModelError(
            f"loss: unknown name, expected one of {', '.join(_LOSSES)}, got {name!r}; "
            f"choose one of them"
        )
    return _LOSSES[name]


class TorchLoss(NamedTuple):
    """How one of torch's own losses reduces its elements.

    Attributes:
        reduction: ``mean``, ``sum`` or ``none``.
        weight: weights of classes, or None.
        ignore_index: the ignored class, or None if targets are not classes.
    """

    reduction: str
    weight: Tensor | None = None
    ignore_index: int | None = None

    def weight_of(self, target: Any, num_samples: int) -> Tensor | float:
        """Return the weight of a micro-batch's mean in the mean over the whole batch.

        This is the number of samples times the fraction of targets that are not ignored: exactly
        the number of samples if all count. Returns a tensor if it depends on values, without
        synchronising with the device.
        """
        if self.ignore_index is None:
            return float(num_samples)
        has_classes = isinstance(target, Tensor) and not target.is_floating_point()
        if not has_classes or not target.numel():  # probabilities: torch divides by their number
            return float(num_samples)
        target = target.long()  # unsigned dtypes cannot represent -100
        is_counted = target != self.ignore_index
        if self.weight is None:
            counted = is_counted.sum().double()
        else:
            weights = self.weight.detach()[torch.where(is_counted, target, 0)].double()
            counted = torch.where(is_counted, weights, 0.0).sum()
        share: Tensor = counted * num_samples / target.numel()
        return share


_WEIGHTED_MEANS: Final = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
_WEIGHTED_FUNCTIONS: Final = (F.cross_entropy, F.nll_loss)


def torch_loss(function: object) -> TorchLoss | None:
    """Return the reduction of one of torch's own losses, or None for other losses.

    Recognises modules of `torch.nn`, functions of `torch.nn.functional`, and functools.partial of
    the latter.
    """
    keywords: Mapping[str, Any] = {}
    if isinstance(function, partial):
        if function.args:
            return None
        keywords, function = function.keywords, function.func
    if isinstance(function, MethodType) and function.__name__ == "forward":
        function = function.__self__
    function = getattr(function, "_orig_mod", function)  # of torch.compile
    if isinstance(function, nn.Module):
        # Check the class's forward, because a subclass may override it.
        forward = type(function).forward
        if forward.__module__ != nn.CrossEntropyLoss.__module__ or keywords:
            return None
        keywords = vars(function) | {"weight": getattr(function, "weight", None)}
        is_weighted = forward in _WEIGHTED_MEANS
    elif getattr(function, "__module__", None) == F.__name__:
        is_weighted = function in _WEIGHTED_FUNCTIONS
    else:
        return None
    ignored = keywords.get("ignore_index", -100) if is_weighted else None
    return TorchLoss(_reduction(keywords), keywords.get("weight"), ignored)


def _reduction(keywords: Mapping[str, Any]) -> str:
    """Return the reduction that keywords select, including torch's legacy keywords."""
    if keywords.get("reduce") is False:
        return "none"
    if keywords.get("size_average") is not None:
        return "mean" if keywords["size_average"] else "sum"
    return str(keywords.get("reduction", "mean"))


# Functions that neither divide nor scale, so that a sum computed after them is still a sum.
_NAMES: Final = """
    __add__ __bool__ __eq__ __ge__ __get__ __getitem__ __gt__ __iadd__ __le__ __len__ __lt__ __ne__
    __neg__ __pow__ __radd__ __rsub__ __sub__ abs add argmax clamp contiguous detach dim double exp
    flatten float int log log_softmax logsigmoid long neg numel permute pow relu reshape rsub
    sigmoid size square squeeze stack sub sum to transpose type_as unflatten unsqueeze view where
"""
_HARMLESS: Final = frozenset(_NAMES.split())
_ADDS: Final = frozenset({"__add__", "__radd__", "__iadd__", "add"})
_MULTIPLIES: Final = frozenset({"__mul__", "__rmul__", "__imul__", "mul"})


class Reductions(TorchFunctionMode):
    """Torch function mode that detects whether a user's loss returns a sum or a mean.

    A scalar is known to be a sum if nothing was divided or scaled on the way to it. It is known to
    be a mean if torch computed a mean, or if it is a sum of means. Reductions of a single element
    are neither.

    Attributes:
        counted: for each mean of `F.cross_entropy` or `F.nll_loss`, the total weight of its
            targets, as tensors on their device.
        result: the return value of the loss, or the first of several.
        is_pair: whether the loss returned several values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[Tensor] = []
        self.result: object = None
        self.is_pair = False
        self._sums: list[Tensor] = []
        self._means: list[Tensor] = []
        self._weighed: list[Tensor] = []  # means times a number
        self._num_added: dict[int, int] = {}  # number of means added, by id of the result
        self._is_plain = True  # until a function is called that may divide

    @property
    def is_sum(self) -> bool:
        """Return whether the result is known to be a sum over the whole input of the loss."""
        return _contains_same(self.result, self._sums)

    @property
    def num_means(self) -> int:
        """Return the number of means that the result is the sum of; 0 if unknown."""
        return self._num_added[id(self.result)] if _contains_same(self.result, self._means) else 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one torch function and record a reduction."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func in _WEIGHTED_FUNCTIONS:
            self._note_counted(func, args, kwargs)
        value = func(*args, **kwargs)
        if isinstance(value, Tensor) and value.numel() == 1:
            self._note(func, args, kwargs, value)
        self._is_plain = self._is_plain and (_is_loss(func) or _name_of(func) in _HARMLESS)
        return value

    def _note(self, func: Any, args: Any, kwargs: Mapping[str, Any], value: Tensor) -> None:
        """Record a scalar if it is known to be a sum or a mean."""
        name, numbers = _name_of(func), [each for each in args if isinstance(each, int | float)]
        tensors = [each for each in args if not isinstance(each, int | float)]
        reduction = ""
        if _is_loss(func):
            reduction = _reduction(signature(func).bind(*args, **kwargs).arguments)
        elif len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].numel() > 1:
            reduction = name
        if name in _ADDS and not kwargs and tensors:
            are_means = all(_contains_same(each, self._means + self._weighed) for each in tensors)
            if all(_contains_same(each, self._sums) for each in tensors):
                reduction = "sum"
            elif are_means and any(_contains_same(each, self._means) for each in tensors):
                reduction = "mean"
        if reduction == "sum" and self._is_plain:
            self._sums.append(value)
        elif reduction in ("mean", "batchmean"):
            self._note_mean(self._means, value, tensors)
        elif (
            name in _MULTIPLIES and numbers and all(_contains_same(t, self._means) for t in tensors)
        ):
            self._note_mean(self._weighed, value, tensors)

    def _note_mean(self, means: list[Tensor], value: Tensor, made_of: Sequence[Any]) -> None:
        means.append(value)
        number = sum(self._num_added.get(id(each), 0) for each in made_of)
        self._num_added[id(value)] = max(1, number)

    def _note_counted(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        given = dict(signature(func).bind(*args, **kwargs).arguments)
        loss, target = torch_loss(partial(func, **given)), given.get("target")
        if loss is not None and loss.reduction == "mean" and isinstance(target, Tensor):
            with torch.no_grad():
                weight = loss.weight_of(target, target.numel())
            if isinstance(weight, Tensor):
                self.counted.append(weight)


def _is_loss(function: Any) -> bool:
    """Return whether a torch function is a loss that has a keyword `reduction`."""
    name = _name_of(function)
    is_named_so = (
        name.endswith(("loss", "cross_entropy", "entropy_with_logits")) or name == "kl_div"
    )
    return is_named_so and getattr(function, "__module__", None) == F.__name__


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", ""))


def _contains_same(value: object, known: Sequence[Tensor]) -> bool:
    return any(value is each for each in known)
