"""Where the figures of a run may go, by name."""

from typing import Final

TRACKERS: Final = ("tensorboard", "wandb", "mlflow")
"""What `metrics.to` takes."""
