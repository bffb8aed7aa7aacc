"""What settings of data may be that several kinds have; each kind checks its own."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

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
