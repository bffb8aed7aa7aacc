"""Remedies for common errors of torch in layers and losses, recognised by their error messages."""

import re
from typing import Final, NamedTuple

from gpipe_hpc.errors import GpipeError, ModelError, words_of


class _Known(NamedTuple):
    """A regular expression for error messages of torch, and the remedy to show."""

    text: "re.Pattern[str]"
    remedy: str


_NO_MEMORY: Final = "can't allocate memory"
# Used while layers are measured; in a step, the planner's explanation is shown instead.
_LESS_MEMORY: Final = (
    "out of memory: use more micro-batches or more stages, recompute=always, or a smaller "
    "batch (python -m gpipe_hpc.plan shows what a layout needs)"
)

_WHOLE: Final = r"(?:torch\.)?(?:Long|long|Int|int|Byte|Char|Short|unsigned|uint|Bool|bool)[\w ]*"
_FLOAT: Final = r"(?:torch\.)?(?:Float|float|BFloat16|Half|Double|double|c10::)[\w ]*"
_DOUBLE: Final = r"(?:torch\.)?(?:Double|double)\w*"

_VECTORS: Final = (
    r"the layer expects vectors of size \2 but got size \1: correct its size, or put a layer "
    "before it that reshapes, such as nn.Flatten()"
)

_KNOWN: Final = (
    _Known(
        re.compile(
            rf"same dtype,? but got:? {_WHOLE}(?:!=|and) {_FLOAT}"
            rf"|Input type \({_WHOLE}\) and (?:bias|weight) type \({_FLOAT}\)"
            r"|input dtype \(torch\.(?:u?int\d+|bool)\) does not match weight"
            r"|not implemented for '(?:Long|Int|Byte|Char|Short|Bool)'"
        ),
        "the layer expects floating-point input but got integers or booleans: convert it with "
        "inputs.float() (on the command line with data=arrays data.inputs_dtype=float32); values "
        "are kept, so images stay in the range 0 to 255",
    ),
    _Known(
        re.compile(
            rf"same dtype,? but got:? {_DOUBLE}|Input type \({_DOUBLE}\) and (?:bias|weight) type"
            r"|input dtype \(torch\.float64\) does not match weight"
        ),
        "the input is float64, NumPy's default, but the layer has another dtype: convert the input "
        "to the dtype of the layer, with array.astype('float32') or tensor.float()",
    ),
    _Known(
        re.compile(r"mixed dtype"),
        "the input and the weights have different dtypes: convert the input with inputs.float() "
        "(on the command line with data=arrays data.inputs_dtype=float32)",
    ),
    _Known(
        re.compile(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)"),
        _VECTORS,
    ),
    # The message of torch for tensors on the meta device.
    _Known(
        re.compile(r"must have same reduction dim, but got \[\d+, (\d+)\] X \[(\d+), \d+\]"),
        _VECTORS,
    ),
    _Known(
        re.compile(
            r"expected input\[.*\] to have \d+ channels, but got \d+ channels"
            r"|Invalid channel dimensions"
        ),
        "images must have shape [samples, channels, height, width]: add a channel dimension with "
        "array[:, None], or move a trailing one with np.moveaxis(array, -1, 1)",
    ),
    _Known(
        re.compile(r"'indices' to have one of the following scalar types: Long, Int"),
        "the layer expects integer indices but got floating-point input: convert it with "
        "inputs.long() (on the command line with data=arrays data.inputs_dtype=int64)",
    ),
    _Known(
        re.compile(r"expected (?:scalar type|target dtype to be) Long\b.* (?:found|got) \w+"),
        "class indices must be integers: convert them with targets.long() (on the command line "
        "with data=arrays data.targets_dtype=int64)",
    ),
    _Known(
        re.compile(r"Output size is too small|Kernel size can't be greater than actual input"),
        "the input of the layer is too small: use larger images, or fewer layers before it that "
        "reduce their size",
    ),
    _Known(
        re.compile(r"0D or 1D target tensor expected"),
        "targets must have one class index per sample: pass one-dimensional targets, such as "
        "targets[:, 0]",
    ),
    _Known(
        re.compile(r"Target -?\d+ is out of bounds"),
        "class indices must be at least 0 and less than the number of outputs: correct the "
        "targets, or give the last layer more outputs (for regression, convert targets with "
        "targets.float(), on the command line with data=arrays data.targets_dtype=float32)",
    ),
    _Known(
        re.compile(r"index out of range in self"),
        "an index is outside of the embedding: correct the inputs, or give the embedding more rows "
        "(for tokens, the size of the vocabulary)",
    ),
)


def is_shape_mistake(error: BaseException | None) -> bool:
    """Return whether torch or a gpipe_hpc loss rejected the shape or dtype of its input."""
    if isinstance(error, GpipeError):
        return isinstance(error, ModelError)
    return error is not None and any(each.text.search(str(error)) for each in _KNOWN)


def with_remedy(error: BaseException, otherwise: str) -> str:
    """Return class, text and remedy of an error, or only the text of an error of gpipe_hpc."""
    if isinstance(error, GpipeError):
        return str(error)
    return f"{words_of(error)}; {remedy_of(error) or otherwise}"


def remedy_of(error: BaseException) -> str | None:
    """Return the remedy for an error of torch, to append to its text, or None if it is unknown."""
    text = str(error)
    if type(error).__name__ in ("OutOfMemoryError", "MemoryError") or _NO_MEMORY in text:
        return _LESS_MEMORY
    found = ((each, each.text.search(text)) for each in _KNOWN)
    return next((match.expand(each.remedy) for each, match in found if match), None)
