"""Base classes of the settings of data sets.

Each kind of data is a subclass in `gpipe_hpc.data` with its settings, its checks and `open`. A
preset of ``conf/data/`` names the class as ``_target_``. Common settings are keyword-only fields,
so that the fields of a subclass come first.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from gpipe_hpc.errors import ConfigError
from gpipe_hpc.settings.fields import Choices, Level, Range, refuse


class Shape(NamedTuple):
    """Name of a tensor's torch dtype, and its size in each dimension."""

    dtype: str
    sizes: tuple[int, ...]


class Shapes(NamedTuple):
    """Shapes of the inputs and targets of a batch, and the name of the matching loss."""

    inputs: Shape
    targets: Shape
    loss: str


@dataclass
class DataConfig:
    """Settings that all kinds of data have."""

    # Paths and reading options are not compared on resume: the content of the files is.
    no_matter: ClassVar[frozenset[str]] = frozenset(
        {
            "workers",
            "prefetch",
            "path",
            "paths",
            "root",
            "validation_paths",
            "num_validation_samples",
            "index_dir",
            "_target_",
        }
    )
    """Settings that change neither the samples nor their order."""
    is_computed: ClassVar[bool] = False
    """Whether the other settings alone determine the samples, without files or code of the user."""

    workers: Annotated[int, Range(0, 1024), Level.EVERYDAY] = field(default=0, kw_only=True)
    """Number of threads (for data=own: processes) that read batches ahead on each rank that reads
    inputs. 0: the rank reads a batch when it needs it."""

    prefetch: Annotated[int, Range(1)] = field(default=2, kw_only=True)
    """Number of batches that each worker reads ahead."""

    @property
    def kind(self) -> str:
        """Return the name by which checkpoints identify this kind of data."""
        return type(self).__name__

    def check(self) -> None:
        """Raise ConfigError for settings that cannot work together."""

    def open(self, seed: int, spare: Path | None) -> Any:
        """Return the `DataSource` that the settings describe.

        Args:
            seed: The seed of the run.
            spare: Folder for index files if the folder of the data is read-only.

        Raises DataError if there are no training samples.
        """
        raise ConfigError(
            f"data: {type(self).__name__} provides no samples; choose a preset of conf/data "
            f"(data=...)"
        )

    def shapes(self, num_samples: int) -> Shapes:
        """Return the shapes of a batch of `num_samples`, without reading data.

        Raises ConfigError if they are unknown.
        """
        raise ConfigError(
            f"data: the shapes of {type(self).__name__} are unknown; plan with synthetic data of "
            f"the same shapes"
        )

    def written(self) -> Mapping[str, Any]:
        """Return the settings as plain values, as in a YAML file."""
        kind = type(self)
        return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **asdict(self)}


@dataclass
class TokenDataConfig(DataConfig):
    """Settings of token sequences of equal length."""

    seq_len: Annotated[int, Range(1), Level.EVERYDAY] = field(default=128, kw_only=True)
    """Number of tokens in a sample. A sample of a text may span several documents."""

    vocab_size: Annotated[int, Range(1, 2**31), Level.EVERYDAY] = field(default=256, kw_only=True)
    """Vocabulary size: every token of the data is smaller. 256 for bytes."""

    objective: Annotated[str, Choices("next_token", "masked"), Level.EVERYDAY] = field(
        default="next_token", kw_only=True
    )
    """Training objective: next_token, or masked (predict masked tokens, as BERT does)."""

    mask_token: Annotated[int | None, Range(0, 2**31)] = field(default=None, kw_only=True)
    """With data.objective=masked: the token that replaces masked ones. null: data.vocab_size, which
    needs one more token in the model."""

    mask_fraction: Annotated[float, Range(0, 1, excludes_least=True)] = field(
        default=0.15, kw_only=True
    )
    """With data.objective=masked: fraction of the tokens that are predicted. 80 % of these are
    masked, 10 % are replaced by random tokens and 10 % are unchanged."""

    @property
    def holds_bytes(self) -> bool:
        """Return whether the tokens are bytes of text."""
        return False

    @property
    def hidden_token(self) -> int:
        """Return the token that replaces masked tokens."""
        return self.vocab_size if self.mask_token is None else self.mask_token

    @property
    def num_tokens(self) -> int:
        """Return the vocabulary size that the model needs, including the mask token."""
        if self.objective != "masked":
            return self.vocab_size
        return max(self.vocab_size, self.hidden_token + 1)

    def check_vocabulary(self, model_vocab_size: int) -> None:
        """Raise ConfigError if the mask token is not in the vocabulary of the model."""
        if self.vocab_size <= model_vocab_size < self.num_tokens:
            raise refuse(
                "data.mask_token",
                f"less than model.vocab_size={model_vocab_size}",
                self.hidden_token,
                f"set a smaller data.mask_token, or model.vocab_size={self.num_tokens}",
            )

    def shapes(self, num_samples: int) -> Shapes:
        """Return the shapes of a batch."""
        tokens = Shape("int64", (num_samples, self.seq_len))
        return Shapes(tokens, tokens, "token_cross_entropy")


@dataclass
class ImageDataConfig(DataConfig):
    """Settings of images of equal size with a class each."""

    channels: Annotated[int, Range(1), Level.EVERYDAY] = field(default=3, kw_only=True)
    """Number of channels of an image: 3 for color, 1 for grayscale."""

    height: Annotated[int, Range(1), Level.EVERYDAY] = field(default=224, kw_only=True)
    """Height in pixels of the images that the model receives."""

    width: Annotated[int, Range(1), Level.EVERYDAY] = field(default=224, kw_only=True)
    """Width in pixels of the images that the model receives."""

    num_classes: Annotated[int, Range(2), Level.EVERYDAY] = field(default=1000, kw_only=True)
    """Number of classes."""

    def shapes(self, num_samples: int) -> Shapes:
        """Return the shapes of a batch."""
        images = Shape("float32", (num_samples, self.channels, self.height, self.width))
        return Shapes(images, Shape("int64", (num_samples,)), "classification")
