"""Conversion of Hugging Face transformers models to sequences of layers.

The libraries transformers and safetensors are optional; they are imported on first use.
"""

from gpipe_hpc.models.huggingface.building import huggingface_layers
from gpipe_hpc.models.losses import causal_lm

__all__ = ["causal_lm", "huggingface_layers"]
