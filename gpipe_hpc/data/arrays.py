"""Arrays in files: row i of one array is the input of sample i, row i of another its target."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Final

import torch
from torch import Tensor

from gpipe_hpc.data.array_files import StoredArray, open_array
from gpipe_hpc.data.pairs import PairSource, check_fraction, fitting_loss, loss_of_samples, split
from gpipe_hpc.errors import ConfigError, UnfitDataError
from gpipe_hpc.settings import Choices, DataConfig, Level, Shape, Shapes, refuse

_DTYPES: Final = Choices(
    *("auto", "stored", "float64", "float32", "bfloat16", "float16"),
    *("int64", "int32", "uint8", "bool"),
)


@dataclass
class ArraysConfig(DataConfig):
    """Settings of training data in the user's own NumPy or safetensors files."""

    no_matter: ClassVar[frozenset[str]] = DataConfig.no_matter | {
        "inputs",
        "targets",
        "validation_inputs",
        "validation_targets",
    }

    inputs: Annotated[str | None, Level.EVERYDAY] = None
    """File of the inputs; the first dimension is the samples."""

    targets: Annotated[str | None, Level.EVERYDAY] = None
    """File of the targets. null: an array in the file of the inputs."""

    inputs_key: str | None = None
    """Name of the inputs in an archive (.npz, .safetensors). null: its only array, or inputs."""

    targets_key: str | None = None
    """Name of the targets in an archive. null: its only array, or targets."""

    inputs_dtype: Annotated[str, _DTYPES] = "auto"
    """Type of the inputs in training. auto: float32, or int64 for integers. stored: as in the file.
    float32 keeps the range 0 to 255 of images."""

    targets_dtype: Annotated[str, _DTYPES] = "auto"
    """Type of the targets, as inputs_dtype. Integers are classes and get another loss than
    floating-point numbers."""

    validation_inputs: Annotated[str | None, Level.EVERYDAY] = None
    """File of inputs for validation. null: validation_fraction of the rows."""

    validation_targets: Annotated[str | None, Level.EVERYDAY] = None
    """File of targets for validation."""

    validation_fraction: Annotated[float, Level.EVERYDAY] = 0.05
    """Fraction of the rows for validation, spread over the file, the same rows in every run."""

    def check(self) -> None:
        """Check the settings; raise ConfigError naming the one that is wrong."""
        super().check()
        if not self.inputs:
            remedy = "as data.inputs=x.npy data.targets=y.npy"
            raise refuse("data.inputs", "a file", self.inputs, remedy)
        if self.validation_targets and not self.validation_inputs:
            remedy = "set it to the inputs of data.validation_targets"
            raise refuse("data.validation_inputs", "a file", self.validation_inputs, remedy)
        check_fraction(self.validation_fraction)

    def open(self, seed: int, spare: Path | None) -> PairSource:
        """Open the files with `open_arrays`."""
        return open_arrays(self)

    def shapes(self, num_samples: int) -> Shapes:
        """Return the shapes of a batch of `num_samples`, from the headers of the files."""
        whole = self.training_arrays()
        loss = fitting_loss(whole.read_targets([0]))
        if loss is None:
            raise ConfigError(
                "data: no default loss for these targets, which must be floating-point numbers or "
                f"integer classes: got {whole.targets}; set data.targets_dtype"
            )
        inputs, targets = (
            Shape(str(each.dtype).removeprefix("torch."), (num_samples, *each.stored.shape[1:]))
            for each in (whole.inputs, whole.targets)
        )
        return Shapes(inputs, targets, loss)

    def training_arrays(self) -> "ArrayPairs":
        """Open the arrays of `inputs` and `targets`, reading only their headers."""
        assert self.inputs is not None, "checked before"
        return self._pairs("", self.inputs, self.targets)

    def validation_arrays(self) -> "ArrayPairs | None":
        """Open `validation_inputs` and `validation_targets`; return None if they are not set."""
        if not self.validation_inputs:
            return None
        return self._pairs("validation_", self.validation_inputs, self.validation_targets)

    def _pairs(self, which: str, inputs: str, targets: str | None) -> "ArrayPairs":
        # One archive may hold both.
        other = targets or inputs
        stored = (
            open_array(inputs, self.inputs_key, which, "inputs"),
            open_array(other, self.targets_key, which, "targets", is_given=targets is not None),
        )
        wanted = {"inputs_dtype": self.inputs_dtype, "targets_dtype": self.targets_dtype}
        for each, (name, dtype) in zip(stored, wanted.items(), strict=True):
            _refuse_complex(each, name, dtype)
        return ArrayPairs(*map(ArrayRows, stored, wanted.values()))


@dataclass(frozen=True)
class ArrayRows:
    """A stored array and the dtype that its rows are converted to."""

    stored: StoredArray
    wanted: str = "auto"

    @cached_property
    def dtype(self) -> torch.dtype:
        """Return the dtype of rows; "auto" means float32, int64 for integers, or bool."""
        own = self.stored.dtype
        if self.wanted == "stored":
            return own
        if self.wanted != "auto":
            chosen: torch.dtype = getattr(torch, self.wanted)
            return chosen
        if own == torch.bool:
            return own
        return torch.float32 if own.is_floating_point else torch.int64

    def read(self, indices: Sequence[int]) -> Tensor:
        """Return the given rows, converted to `dtype`."""
        return self.stored.rows(indices).to(self.dtype)

    def __str__(self) -> str:
        return f"{self.stored} read as {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class ArrayPairs:
    """Pairs of rows: sample i is row i of the inputs and row i of the targets."""

    inputs: ArrayRows
    targets: ArrayRows
    num_samples: int = field(init=False)

    def __post_init__(self) -> None:
        length, other = (each.stored.shape[0] for each in (self.inputs, self.targets))
        if length != other:
            raise UnfitDataError(
                f"data: inputs and targets differ in the number of rows (the first dimension): "
                f"{self.inputs.stored} and {self.targets.stored}; set data.targets to "
                f"the targets of these inputs"
            )
        if not length:
            raise UnfitDataError(
                f"data: {self.inputs.stored} has no rows; at least one sample is needed"
            )
        object.__setattr__(self, "num_samples", length)

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return rows of the inputs, of shape [len(indices), ...]."""
        return self.inputs.read(indices)

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return rows of the targets, of shape [len(indices), ...]."""
        return self.targets.read(indices)

    def digest(self) -> str:
        """Return a digest of file names, shapes and dtypes."""
        return f"{self.inputs}/{self.targets}"


def open_arrays(config: ArraysConfig) -> PairSource:
    """Open arrays in files as training and validation data, reading only headers.

    Validation data is `validation_inputs` and `validation_targets`, or else a fraction of the rows,
    spread over the file.

    Raises:
        DataError: if a file does not exist, has an unsupported format or contains several arrays to
            choose from, or if inputs and targets do not match.
    """
    whole = config.training_arrays()
    held = config.validation_arrays()
    if held is None:
        train, validation = split(whole, config.validation_fraction, str(whole.inputs.stored))
    else:
        train, validation = whole, held
        for ours, theirs in ((whole.inputs, held.inputs), (whole.targets, held.targets)):
            _refuse_unlike(ours, theirs)
    loss = loss_of_samples(whole, whole.read_targets([0]))
    about = (
        f"inputs {whole.inputs}, targets {whole.targets}; {train.num_samples} training samples, "
        f"{validation.num_samples} validation samples"
    )
    return PairSource(train, validation, loss, about)


def _refuse_complex(stored: StoredArray, setting: str, wanted: str) -> None:
    """Raise ConfigError if complex numbers would be converted to a real dtype."""
    if stored.dtype.is_complex and wanted != "stored":
        raise refuse(
            f"data.{setting}",
            f"stored for complex numbers ({stored})",
            wanted,
            "set it if the model accepts complex inputs; otherwise save real and imaginary parts "
            "as separate numbers with np.stack([x.real, x.imag], 1)",
        )


def _refuse_unlike(train: ArrayRows, validation: ArrayRows) -> None:
    ours = (train.dtype, train.stored.shape[1:])
    theirs = (validation.dtype, validation.stored.shape[1:])
    if ours != theirs:
        raise UnfitDataError(
            f"data: training and validation samples differ in shape or dtype: {train.stored} and "
            f"{validation.stored}; convert one of them"
        )
