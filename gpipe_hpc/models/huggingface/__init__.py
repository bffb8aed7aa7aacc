"""Models of the transformers library as sequences of layers.

transformers and safetensors are optional: they are loaded when a model is asked for.
"""

from gpipe_hpc.models.huggingface.building import huggingface_layers
from gpipe_hpc.models.losses import causal_lm

__all__ = ["causal_lm", "huggingface_layers"]
