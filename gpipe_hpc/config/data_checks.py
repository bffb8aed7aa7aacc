"""Which settings of data cannot work."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from gpipe_hpc.config.data import (
    CifarConfig,
    CodedImagesConfig,
    DataConfig,
    DigitsConfig,
    IdxConfig,
    ImageFolderConfig,
    ImageShardsConfig,
    JsonLinesConfig,
    PixelDataConfig,
    PythonSourceConfig,
    StoredImagesConfig,
    TextConfig,
    TokenDataConfig,
)
from gpipe_hpc.config.refusal import refuse

_INF: Final = math.inf

# Setting -> (least, most), where the chosen kind has it.
DATA_RANGES: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        "data.workers": (0, 1024),
        "data.prefetch": (1, _INF),
        "data.seq_len": (1, _INF),
        "data.vocab_size": (1, 2**31),
        "data.mask_token": (0, 2**31),
        "data.mask_fraction": (0.0, 1.0),
        "data.validation_percent": (0, 99),
        "data.num_samples": (1, _INF),
        "data.num_validation_samples": (0, _INF),
        "data.channels": (1, _INF),
        "data.height": (1, _INF),
        "data.width": (1, _INF),
        "data.num_classes": (2, _INF),
        "data.padding": (0, _INF),
        "data.resize": (1, _INF),
        "data.max_pixels": (1, _INF),
        "data.max_corrupt": (1, _INF),
    }
)

DATA_CHOICES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "data.dtype": ("uint8", "uint16", "int16", "uint32", "int32", "int64"),
        "data.label": ("fine", "coarse"),
        "data.corrupt": ("stop", "skip"),
        "data.objective": ("next_token", "masked"),
    }
)


def check_data(data: DataConfig) -> None:
    """Refuse settings of data that cannot work together; raises ConfigError that names one."""
    if isinstance(data, PythonSourceConfig) and data.vocab_size < 256:
        raise refuse("data.vocab_size", "256 or more for bytes", data.vocab_size, "leave it at 256")
    if isinstance(data, TokenDataConfig) and not data.mask_fraction:
        raise refuse("data.mask_fraction", "above 0", data.mask_fraction, "as 0.15")
    _check_paths(data)
    if isinstance(data, TextConfig) and not 0 <= data.validation_fraction < 1:
        raise refuse(
            "data.validation_fraction", "0 <= fraction < 1", data.validation_fraction, "lower it"
        )
    if isinstance(data, JsonLinesConfig):
        _check_separator(data)
    if isinstance(data, PixelDataConfig):
        _check_pixels(data)


def _check_paths(data: DataConfig) -> None:
    if isinstance(data, TextConfig | JsonLinesConfig | ImageShardsConfig) and not data.paths:
        raise refuse("data.paths", "files or patterns", [], "as data.paths=[corpus/*]")
    if isinstance(data, IdxConfig | CifarConfig | ImageFolderConfig) and not data.path:
        raise refuse("data.path", "a folder", data.path, "as data.path=/where/the/files/are")


def _check_separator(data: JsonLinesConfig) -> None:
    if not 0 <= data.separator < data.vocab_size or data.vocab_size < 256:
        raise refuse(
            "data.separator",
            f"a token below data.vocab_size={data.vocab_size}, itself 256 or more for bytes",
            data.separator,
            "leave data.separator at 256 and data.vocab_size at 257",
        )


def _check_pixels(data: PixelDataConfig) -> None:
    crops = ("none", "resized_crop_flip")
    shifts = ("none", "pad_crop", "pad_crop_flip")
    choices = crops if isinstance(data, CodedImagesConfig) else shifts
    if data.augment not in choices:
        raise refuse(
            "data.augment", f"one of {', '.join(choices)}", data.augment, "choose one of them"
        )
    for name, values in (("mean", data.mean), ("std", data.std)):
        if len(values) != data.channels or not all(math.isfinite(each) for each in values):
            raise refuse(
                f"data.{name}", f"a number for each of {data.channels} channels", values, "give it"
            )
    if min(data.std) <= 0:
        raise refuse("data.std", "deviations above 0", data.std, "raise them, 1 changes nothing")
    if isinstance(data, CodedImagesConfig):
        _check_coded(data)
    if isinstance(data, StoredImagesConfig):
        _check_stored(data)


def _check_coded(data: CodedImagesConfig) -> None:
    if data.channels not in (1, 3):
        raise refuse("data.channels", "3 (colour) or 1 (grey)", data.channels, "choose one")
    if not 0 < data.min_area <= 1:
        raise refuse("data.min_area", "0 < area <= 1", data.min_area, "it is a share of the image")
    if data.resize < max(data.height, data.width):
        raise refuse(
            "data.resize",
            f"at least data.height={data.height} and data.width={data.width}",
            data.resize,
            "raise it: the centre of the resized image is cut out for validation",
        )


def _check_stored(data: StoredImagesConfig) -> None:
    if data.padding >= min(data.height, data.width):
        raise refuse("data.padding", "less than an image's side", data.padding, "lower it")
    sizes = {CifarConfig: (3, 32, 32), DigitsConfig: (1, 8, 8)}
    for kind, size in sizes.items():
        shape = (data.channels, data.height, data.width)
        if isinstance(data, kind) and shape != size:
            raise refuse(
                "data.channels, data.height, data.width",
                f"{size}, as the images are",
                shape,
                "leave them as they are",
            )
