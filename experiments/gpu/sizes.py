"""The trained models: GPTs of several sizes, the largest of which fits on the device."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpipe_hpc import Pipeline
from gpipe_hpc.device.device import Device
from gpipe_hpc.models import build_gpt, token_cross_entropy


@dataclass(frozen=True)
class Size:
    """A GPT and the batch of a step."""

    num_layers: int
    width: int
    num_heads: int
    seq_len: int
    vocab_size: int
    samples: int  # of one micro-batch
    microbatches: int
    rounds: int  # in each of which all contestants step once

    def layers(self) -> list[Any]:
        """Return the layers as specs."""
        return build_gpt(
            vocab_size=self.vocab_size,
            block_size=self.seq_len,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            width=self.width,
        )

    @property
    def multiplied(self) -> int:
        """Return the number of parameters in matmuls, without embeddings."""
        return 12 * self.num_layers * self.width**2 + self.width * self.vocab_size

    @property
    def flops(self) -> float:
        """Return the FLOPs of a step, 6N plus attention."""
        tokens = self.samples * self.microbatches * self.seq_len
        attention = 12 * self.num_layers * self.width * self.seq_len
        return tokens * (6.0 * self.multiplied + attention)

    @property
    def needed_bytes(self) -> float:
        """Return the approximate memory of three contestants at once."""
        weights = self.multiplied + self.width * (self.vocab_size + self.seq_len)
        kept = 40 * self.num_layers * self.width + 12 * self.vocab_size
        # Weights, gradients and two moments in float32, and casts; the activations of one
        # micro-batch, as one contestant steps at a time.
        return 3 * 18 * weights + self.samples * self.seq_len * kept

    def pipeline(self, device: Device, **settings: Any) -> Pipeline:
        """Return a pipeline of one rank in bfloat16."""
        return Pipeline(
            self.layers(),
            token_cross_entropy,
            stages=1,
            microbatches=self.microbatches,
            precision="bfloat16",
            device=device.type,
            **settings,
        )

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of one step."""
        generator = torch.Generator().manual_seed(0)
        shape = (2, self.samples * self.microbatches, self.seq_len)
        inputs, targets = torch.randint(0, self.vocab_size, shape, generator=generator)
        return inputs, targets


# From the largest: 1.4 billion parameters, 840, 410 and 160 million.
SIZES = {
    "xl": Size(24, 2048, 16, 1024, 50304, 4, 8, 8),
    "large": Size(24, 1536, 16, 1024, 50304, 4, 8, 8),
    "medium": Size(24, 1024, 16, 1024, 50304, 4, 8, 10),
    "small": Size(12, 768, 12, 1024, 50304, 4, 8, 10),
    "tiny": Size(2, 64, 4, 32, 128, 2, 4, 3),
}


def size_for(
    name: str, free_bytes: int | None, is_accelerator: bool, most: str = "xl"
) -> tuple[str, Size]:
    """Return the size with a name; for ``auto``, the largest up to `most` that fits easily."""
    if name == "auto":
        name = "tiny"
        if is_accelerator:
            room = 0.8 * (free_bytes or 0)
            allowed = list(SIZES)[list(SIZES).index(most) :]
            fits = [each for each in allowed if SIZES[each].needed_bytes <= room]
            name = fits[0] if fits else "tiny"
    return name, SIZES[name]
