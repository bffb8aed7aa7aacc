"""Export trained weights as safetensors, a format that other libraries read.

A transformers model is stored under its own names with its config.json, so that `from_pretrained`
reads the folder; any other model under `layers.<index>.<name>`.
"""

from gpipe_hpc.export.checkpoints import export_checkpoint
from gpipe_hpc.export.ranks import export_safetensors

__all__ = ["export_checkpoint", "export_safetensors"]
