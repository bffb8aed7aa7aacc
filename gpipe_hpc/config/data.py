"""What settings of all kinds of data have in common.

A kind is one file of `gpipe_hpc.training.data` with a dataclass: its settings, which of them cannot
be, and how it is opened. A YAML file of ``conf/data/`` names that class by ``_target_``; nothing
else knows it. What each setting means stands beside it in the YAML file. What kinds have in common
is given by keyword, so that the settings of a kind itself come first.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from gpipe_hpc.config.refusal import refuse
from gpipe_hpc.errors import ConfigError


class Shape(NamedTuple):
    """The kind of numbers of a tensor, by torch's name of it, and its size in each dimension."""

    dtype: str
    sizes: tuple[int, ...]


class Shapes(NamedTuple):
    """What a batch looks like, and the name of the loss that fits."""

    inputs: Shape
    targets: Shape
    loss: str


# Where files are, and how they are read; what they hold is told by looking.
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

    workers: int = field(default=0, kw_only=True)
    prefetch: int = field(default=2, kw_only=True)

    @property
    def kind(self) -> str:
        """Return what tells data of this kind from others, in checkpoints."""
        return type(self).__name__

    def check(self) -> None:
        """Refuse settings that cannot work; raises ConfigError that names one."""

    def open(self, seed: int, spare: Path | None) -> Any:
        """Return the `DataSource` that the settings describe.

        `seed` is that of the run; `spare`: a folder for indices of data whose own is read-only.
        Raises DataError where there is nothing to train on.
        """
        raise ConfigError(
            f"data: {type(self).__name__} cannot be opened, expected a kind of conf/data, got one "
            f"that says nothing of its samples; choose data=..."
        )

    def shapes(self, num_samples: int) -> Shapes:
        """Return what a batch of so many samples looks like; raises ConfigError if it is unknown.

        Nothing is read, as a plan is made where the data need not be.
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

    seq_len: int = field(default=128, kw_only=True)
    vocab_size: int = field(default=256, kw_only=True)
    objective: str = field(default="next_token", kw_only=True)
    mask_token: int | None = field(default=None, kw_only=True)
    mask_fraction: float = field(default=0.15, kw_only=True)

    @property
    def holds_bytes(self) -> bool:
        """Say whether tokens are the bytes of texts."""
        return False

    def check(self) -> None:
        """Refuse settings that cannot work; raises ConfigError that names one."""
        super().check()
        if not self.mask_fraction:
            raise refuse("data.mask_fraction", "above 0", self.mask_fraction, "as 0.15")

    def shapes(self, num_samples: int) -> Shapes:
        """Return the shapes of a batch."""
        tokens = Shape("int64", (num_samples, self.seq_len))
        return Shapes(tokens, tokens, "token_cross_entropy")


@dataclass
class ImageDataConfig(DataConfig):
    """Images of one size, and their classes."""

    channels: int = field(default=3, kw_only=True)
    height: int = field(default=224, kw_only=True)
    width: int = field(default=224, kw_only=True)
    num_classes: int = field(default=1000, kw_only=True)

    def shapes(self, num_samples: int) -> Shapes:
        """Return the shapes of a batch."""
        images = Shape("float32", (num_samples, self.channels, self.height, self.width))
        return Shapes(images, Shape("int64", (num_samples,)), "classification")


def mask_token_of(config: TokenDataConfig) -> int:
    """Return the token that stands for a hidden one."""
    return config.vocab_size if config.mask_token is None else config.mask_token


def num_tokens_of(config: TokenDataConfig) -> int:
    """Return how many tokens a model must know: the mask is one of them where tokens are hidden."""
    if config.objective != "masked":
        return config.vocab_size
    return max(config.vocab_size, mask_token_of(config) + 1)
