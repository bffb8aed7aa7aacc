"""What to do about the commonest errors of torch in layers and losses, told by its words."""

import re
from typing import Final, NamedTuple

from gpipe_hpc.errors import GpipeError, ModelError, words_of


class _Known(NamedTuple):
    """Errors whose text matches, and what to do about them."""

    text: "re.Pattern[str]"
    remedy: str


_NO_MEMORY: Final = "can't allocate memory"
# Where layers are measured: in a step the plan stands beside it, see `planning.exhausted`.
_LESS_MEMORY: Final = (
    "memory is used up: take more micro-batches or more stages, recompute=always, or a smaller "
    "batch (python -m gpipe_hpc.plan says what a layout needs)"
)

_WHOLE: Final = r"(?:torch\.)?(?:Long|long|Int|int|Byte|Char|Short|unsigned|uint|Bool|bool)[\w ]*"
_FLOAT: Final = r"(?:torch\.)?(?:Float|float|BFloat16|Half|Double|double|c10::)[\w ]*"
_DOUBLE: Final = r"(?:torch\.)?(?:Double|double)\w*"

_VECTORS: Final = (
    r"it takes vectors of \2 numbers and was given some of \1: correct its size, or put a layer "
    "ahead of it that reshapes, as nn.Flatten()"
)

_KNOWN: Final = (
    _Known(
        re.compile(
            rf"same dtype,? but got:? {_WHOLE}(?:!=|and) {_FLOAT}"
            rf"|Input type \({_WHOLE}\) and (?:bias|weight) type \({_FLOAT}\)"
            r"|input dtype \(torch\.(?:u?int\d+|bool)\) does not match weight"
            r"|not implemented for '(?:Long|Int|Byte|Char|Short|Bool)'"
        ),
        "it was given whole numbers or truth values and computes with floats: give it floats, as "
        "inputs.float() (on the command line with data=arrays data.inputs_dtype=float32), which "
        "keeps the values: the 0 to 255 of pictures stay so",
    ),
    _Known(
        re.compile(
            rf"same dtype,? but got:? {_DOUBLE}|Input type \({_DOUBLE}\) and (?:bias|weight) type"
            r"|input dtype \(torch\.float64\) does not match weight"
        ),
        "it was given float64, as NumPy makes by itself, and computes with less: give it floats of "
        "the layer's own type, as array.astype('float32') or tensor.float()",
    ),
    _Known(
        re.compile(r"mixed dtype"),
        "its input and its weights have different types of numbers: give it floats of theirs, as "
        "inputs.float() (on the command line with data=arrays data.inputs_dtype=float32)",
    ),
    _Known(
        re.compile(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)"),
        _VECTORS,
    ),
    # As torch says it of tensors without values.
    _Known(
        re.compile(r"must have same reduction dim, but got \[\d+, (\d+)\] X \[(\d+), \d+\]"),
        _VECTORS,
    ),
    _Known(
        re.compile(
            r"expected input\[.*\] to have \d+ channels, but got \d+ channels"
            r"|Invalid channel dimensions"
        ),
        "pictures are [samples, channels, height, width]: store those without channels as "
        "array[:, None], those with channels behind as np.moveaxis(array, -1, 1)",
    ),
    _Known(
        re.compile(r"'indices' to have one of the following scalar types: Long, Int"),
        "it looks up rows by their numbers and was given floats: give it whole numbers, as "
        "inputs.long() (on the command line with data=arrays data.inputs_dtype=int64)",
    ),
    _Known(
        re.compile(r"expected (?:scalar type|target dtype to be) Long\b.* (?:found|got) \w+"),
        "classes are whole numbers: give them as such, as targets.long() (on the command line with "
        "data=arrays data.targets_dtype=int64)",
    ),
    _Known(
        re.compile(r"Output size is too small|Kernel size can't be greater than actual input"),
        "what it is given is too small for it: give larger pictures, or let fewer layers ahead of "
        "it make them smaller",
    ),
    _Known(
        re.compile(r"0D or 1D target tensor expected"),
        "classes are one whole number for each sample: give targets of one dimension, as "
        "targets[:, 0]",
    ),
    _Known(
        re.compile(r"Target -?\d+ is out of bounds"),
        "classes count from 0 and are fewer than the model's outputs: correct the targets, or let "
        "the last layer have more outputs (targets that are numbers, not classes, are floats: "
        "targets.float(), on the command line with data=arrays data.targets_dtype=float32)",
    ),
    _Known(
        re.compile(r"index out of range in self"),
        "a row's number is beyond its table: correct the inputs, or let the table have more rows "
        "(of tokens as many as there are different ones)",
    ),
)


def is_shape_mistake(error: BaseException | None) -> bool:
    """Say whether torch, or a loss of ours, refused what it was given: shapes, types of numbers."""
    if isinstance(error, GpipeError):
        return isinstance(error, ModelError)
    return error is not None and any(each.text.search(str(error)) for each in _KNOWN)


def with_remedy(error: BaseException, otherwise: str) -> str:
    """Return the kind and text of an error and what to do; messages of ours are as they are."""
    if isinstance(error, GpipeError):
        return str(error)
    return f"{words_of(error)}; {remedy_of(error) or otherwise}"


def remedy_of(error: BaseException) -> str | None:
    """Return what to do about an error of torch, to stand behind its text; None if unknown."""
    text = str(error)
    if type(error).__name__ in ("OutOfMemoryError", "MemoryError") or _NO_MEMORY in text:
        return _LESS_MEMORY
    found = ((each, each.text.search(text)) for each in _KNOWN)
    return next((match.expand(each.remedy) for each, match in found if match), None)
