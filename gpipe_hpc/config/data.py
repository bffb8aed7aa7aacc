"""The schema of ``conf/data/``: one dataclass for each kind of data.

What each setting means stands beside it in the YAML files. What kinds have in common is given by
keyword, so that the settings of a kind itself come first.
"""

from dataclasses import dataclass, field


@dataclass
class DataConfig:
    """What a run reads; one subclass for each kind."""

    workers: int = field(default=0, kw_only=True)
    prefetch: int = field(default=2, kw_only=True)


@dataclass
class TokenDataConfig(DataConfig):
    """Token sequences of one length."""

    seq_len: int = field(default=128, kw_only=True)
    vocab_size: int = field(default=256, kw_only=True)
    objective: str = field(default="next_token", kw_only=True)
    mask_token: int | None = field(default=None, kw_only=True)
    mask_fraction: float = field(default=0.15, kw_only=True)


@dataclass
class ImageDataConfig(DataConfig):
    """Images of one size, and their classes."""

    channels: int = field(default=3, kw_only=True)
    height: int = field(default=224, kw_only=True)
    width: int = field(default=224, kw_only=True)
    num_classes: int = field(default=1000, kw_only=True)


@dataclass
class PythonSourceConfig(TokenDataConfig):
    """The Python files of a folder, bytes as tokens."""

    root: str | None = None
    validation_percent: int = 10


@dataclass
class TextConfig(TokenDataConfig):
    """Files of bytes or of token numbers."""

    paths: list[str] = field(default_factory=list)
    validation_paths: list[str] = field(default_factory=list)
    validation_fraction: float = 0.05
    dtype: str = "uint8"


@dataclass
class TokensConfig(TextConfig):
    """Files of token numbers, as tokenizers write them."""

    dtype: str = "uint16"
    seq_len: int = field(default=1024, kw_only=True)
    vocab_size: int = field(default=50257, kw_only=True)


@dataclass
class JsonLinesConfig(TokenDataConfig):
    """Documents, one JSON object a line, bytes as tokens."""

    paths: list[str] = field(default_factory=list)
    validation_paths: list[str] = field(default_factory=list)
    validation_percent: int = 5
    key: str = "text"
    separator: int = 256
    vocab_size: int = field(default=257, kw_only=True)
    index_dir: str | None = field(default=None, kw_only=True)
    corrupt: str = "stop"
    max_corrupt: int = 100


@dataclass
class SyntheticTokensConfig(TokenDataConfig):
    """Token sequences made from the sample's number."""

    num_samples: int = 4096
    num_validation_samples: int = 256
    seed: int = 0


@dataclass
class SyntheticVectorsConfig(DataConfig):
    """Vectors and their classes, made from the sample's number."""

    num_samples: int = 4096
    num_validation_samples: int = 256
    width: int = 64
    num_classes: int = 10
    seed: int = 0


@dataclass
class SyntheticImagesConfig(ImageDataConfig):
    """Images and their classes, made from the sample's number."""

    num_samples: int = 4096
    num_validation_samples: int = 256
    seed: int = 0


@dataclass
class SyntheticMasksConfig(ImageDataConfig):
    """Images and the class of each pixel, made from the sample's number."""

    num_samples: int = 4096
    num_validation_samples: int = 256
    height: int = field(default=64, kw_only=True)
    width: int = field(default=64, kw_only=True)
    num_classes: int = field(default=2, kw_only=True)
    seed: int = 0


@dataclass
class PixelDataConfig(ImageDataConfig):
    """Real images: how they are varied in training, and brought to mean 0 and deviation 1."""

    augment: str = field(default="none", kw_only=True)
    mean: list[float] = field(default_factory=list, kw_only=True)
    std: list[float] = field(default_factory=list, kw_only=True)


@dataclass
class StoredImagesConfig(PixelDataConfig):
    """Images stored pixel by pixel, all of one size."""

    padding: int = field(default=4, kw_only=True)


@dataclass
class DigitsConfig(StoredImagesConfig):
    """The scans of handwritten digits that scikit-learn carries."""

    channels: int = field(default=1, kw_only=True)
    height: int = field(default=8, kw_only=True)
    width: int = field(default=8, kw_only=True)
    num_classes: int = field(default=10, kw_only=True)
    padding: int = field(default=1, kw_only=True)


@dataclass
class IdxConfig(StoredImagesConfig):
    """Four files in the format of MNIST."""

    path: str | None = None
    train_images: str = "train-images-idx3-ubyte"
    train_labels: str = "train-labels-idx1-ubyte"
    validation_images: str = "t10k-images-idx3-ubyte"
    validation_labels: str = "t10k-labels-idx1-ubyte"
    channels: int = field(default=1, kw_only=True)
    height: int = field(default=28, kw_only=True)
    width: int = field(default=28, kw_only=True)
    num_classes: int = field(default=10, kw_only=True)


@dataclass
class FashionMnistConfig(IdxConfig):
    """Fashion-MNIST, as Debian packs it."""


@dataclass
class CifarConfig(StoredImagesConfig):
    """CIFAR-10, binary version."""

    path: str | None = None
    height: int = field(default=32, kw_only=True)
    width: int = field(default=32, kw_only=True)
    num_classes: int = field(default=10, kw_only=True)


@dataclass
class Cifar100Config(CifarConfig):
    """CIFAR-100, binary version."""

    label: str = "fine"
    num_classes: int = field(default=100, kw_only=True)


@dataclass
class CodedImagesConfig(PixelDataConfig):
    """JPEG and PNG images of any size, cut and scaled to one."""

    resize: int = field(default=256, kw_only=True)
    min_area: float = field(default=0.08, kw_only=True)
    max_pixels: int = field(default=2**26, kw_only=True)
    corrupt: str = field(default="stop", kw_only=True)
    max_corrupt: int = field(default=100, kw_only=True)


@dataclass
class ImageFolderConfig(CodedImagesConfig):
    """A folder of images for each class."""

    index_dir: str | None = field(default=None, kw_only=True)
    path: str | None = None
    train: str = "train"
    validation: str | None = "val"
    validation_percent: int = 5


@dataclass
class ImageShardsConfig(CodedImagesConfig):
    """Tar files of images and their labels."""

    paths: list[str] = field(default_factory=list)
    validation_paths: list[str] = field(default_factory=list)
    validation_percent: int = 5
    label_key: str = "label"
    index_dir: str | None = field(default=None, kw_only=True)


def mask_token_of(config: TokenDataConfig) -> int:
    """Return the token that stands for a hidden one."""
    return config.vocab_size if config.mask_token is None else config.mask_token


def num_tokens_of(config: TokenDataConfig) -> int:
    """Return how many tokens a model must know: the mask is one of them where tokens are hidden."""
    if config.objective != "masked":
        return config.vocab_size
    return max(config.vocab_size, mask_token_of(config) + 1)
