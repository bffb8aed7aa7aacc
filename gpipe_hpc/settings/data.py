"""Settings that kinds of data have in common.

Each kind is a subclass in `gpipe_hpc.data`: its settings, checks and how it is opened. A
preset of ``conf/data/`` names the class by ``_target_``. Common settings are keyword-only, so that
the settings of the kind itself come first.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, NamedTuple

from gpipe_hpc.errors import ConfigError
from gpipe_hpc.settings.fields import Choices, Level, Range, refuse


class Shape(NamedTuple):
    """The dtype of a tensor, by torch's name of it, and its size in each dimension."""

    dtype: str
    sizes: tuple[int, ...]


class Shapes(NamedTuple):
    """What a batch looks like, and the name of the loss that fits."""

    inputs: Shape
    targets: Shape
    loss: str


# Where files are, and how they are read: what they hold is compared instead.
_NO_MATTER: Final = frozenset(
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


@dataclass
class DataConfig:
    """What a run reads; one subclass for each kind."""

    no_matter: ClassVar[frozenset[str]] = _NO_MATTER
    """Settings that change neither samples nor their order."""

    workers: Annotated[int, Range(0, 1024), Level.EVERYDAY] = field(default=0, kw_only=True)
    """Threads that read ahead on each rank with inputs (processes for data=own). 0: the rank reads
    a batch when it needs it."""

    prefetch: Annotated[int, Range(1)] = field(default=2, kw_only=True)
    """Batches that each worker keeps ready."""

    @property
    def kind(self) -> str:
        """Return the name of this kind of data in checkpoints."""
        return type(self).__name__

    def check(self) -> None:
        """Refuse settings that cannot work together; raises ConfigError that names one."""

    def open(self, seed: int, spare: Path | None) -> Any:
        """Return the `DataSource` that the settings describe.

        `seed` is that of the run; `spare`: a folder for indices of data whose own is read-only.
        Raises DataError if there is nothing to train on.
        """
        raise ConfigError(
            f"data: {type(self).__name__} cannot be opened, expected a kind of conf/data, got one "
            f"without samples; choose data=..."
        )

    def shapes(self, num_samples: int) -> Shapes:
        """Return what a batch of so many samples looks like; raises ConfigError if it is unknown.

        No data is read, since a plan is made where the data need not be.
        """
        raise ConfigError(
            f"data: its shapes are unknown, expected one of conf/data, got {type(self).__name__}; "
            f"plan with synthetic data of the same shapes"
        )

    def written(self) -> Mapping[str, Any]:
        """Return the settings as a YAML file would give them."""
        kind = type(self)
        return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **asdict(self)}


@dataclass
class TokenDataConfig(DataConfig):
    """Token sequences of one length."""

    seq_len: Annotated[int, Range(1), Level.EVERYDAY] = field(default=128, kw_only=True)
    """Tokens of a sample. A sample of a text may span several documents."""

    vocab_size: Annotated[int, Range(1, 2**31), Level.EVERYDAY] = field(default=256, kw_only=True)
    """Number of different tokens; every token of the data is smaller. Bytes have 256."""

    objective: Annotated[str, Choices("next_token", "masked"), Level.EVERYDAY] = field(
        default="next_token", kw_only=True
    )
    """What the model predicts: next_token, or masked (hidden tokens, as BERT)."""

    mask_token: Annotated[int | None, Range(0, 2**31)] = field(default=None, kw_only=True)
    """With objective=masked: the token that replaces hidden ones. null: vocab_size, one token more
    for the model."""

    mask_fraction: Annotated[float, Range(0, 1, excludes_least=True)] = field(
        default=0.15, kw_only=True
    )
    """With objective=masked: the fraction of tokens to predict. Of these 80 % are hidden, 10 %
    replaced by random tokens, 10 % left."""

    @property
    def holds_bytes(self) -> bool:
        """Say whether tokens are the bytes of texts."""
        return False

    @property
    def hidden_token(self) -> int:
        """Return the token that replaces hidden ones."""
        return self.vocab_size if self.mask_token is None else self.mask_token

    @property
    def num_tokens(self) -> int:
        """Return how many tokens a model must know, the mask included if tokens are hidden."""
        if self.objective != "masked":
            return self.vocab_size
        return max(self.vocab_size, self.hidden_token + 1)

    def check_vocabulary(self, model_vocab_size: int) -> None:
        """Refuse a mask that lies beyond the tokens of the model; raises ConfigError."""
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
    """Images of one size, and their classes."""

    channels: Annotated[int, Range(1), Level.EVERYDAY] = field(default=3, kw_only=True)
    """Channels of an image: 3 for colour, 1 for grey."""

    height: Annotated[int, Range(1), Level.EVERYDAY] = field(default=224, kw_only=True)
    """Height in pixels of what the model gets."""

    width: Annotated[int, Range(1), Level.EVERYDAY] = field(default=224, kw_only=True)
    """Width in pixels of what the model gets."""

    num_classes: Annotated[int, Range(2), Level.EVERYDAY] = field(default=1000, kw_only=True)
    """Number of classes."""

    def shapes(self, num_samples: int) -> Shapes:
        """Return the shapes of a batch."""
        images = Shape("float32", (num_samples, self.channels, self.height, self.width))
        return Shapes(images, Shape("int64", (num_samples,)), "classification")
