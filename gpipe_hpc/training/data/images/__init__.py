"""Images and their classes: stored pixel by pixel, or as JPEG and PNG."""

from gpipe_hpc.training.data.images.cifar import open_cifar
from gpipe_hpc.training.data.images.digits import open_digits
from gpipe_hpc.training.data.images.folder import open_image_folder
from gpipe_hpc.training.data.images.idx import open_idx
from gpipe_hpc.training.data.images.shards import open_image_shards

__all__ = [
    "open_cifar",
    "open_digits",
    "open_idx",
    "open_image_folder",
    "open_image_shards",
]
