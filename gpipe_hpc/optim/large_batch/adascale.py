"""AdaScale: learning rates for large batches, from measured gradient noise.

Johnson et al., AdaScale SGD: a user-friendly algorithm for distributed training, 2020 (arXiv
2007.05105), algorithm 1 and appendix B.3.
"""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Final

from gpipe_hpc.engine import StepResult
from gpipe_hpc.errors import CheckpointError, ConfigError
from gpipe_hpc.pipeline import Pipeline

_LEAST_VARIANCE: Final = 1e-6  # appendix B.3: gives a gain of 1 without measurements


class AdaScale:
    """Scale the learning rate by how many small-batch steps each large-batch step is worth.

    With g the gradient of a batch of the base size, v its variance and q the squared norm of its
    mean, the gain of a step on `scale` such batches is (v + q) / (v / scale + q): `scale` if there
    is only noise, 1 if there is none. The learning rate is multiplied by the gain, and the schedule
    advances by it::

        pipe = Pipeline(layers, loss_fn, noise_over="microbatches", ...)
        adascale = AdaScale(pipe, scale=8)  # batches have 8 times the samples of those lr is for
        while adascale.progress < num_steps:  # steps of the base batch
            result = pipe.step(inputs, targets)
            pipe.clip_grad_norm_(1.0)
            adascale.update(result)
            for group in optimizer.param_groups:
                group["lr"] = adascale.rate(schedule)  # gain x schedule(steps of the base batch)
            optimizer.step()

    The rule is derived for SGD. All ranks have the same numbers. Save the state in a checkpoint as
    ``extra={"adascale": adascale.state()}``.

    Args:
        pipe: a pipeline with `noise_over`; raises ConfigError otherwise.
        scale: samples of a batch divided by those of the base batch.
        smoothing: share of the averages of v and q kept from step to step; None: 1 - parts / 1000,
            at least 0. Averages start without bias, as in fairscale.
    """

    def __init__(self, pipe: Pipeline, scale: float, *, smoothing: float | None = None) -> None:
        if pipe.request.noise_over is None:
            raise ConfigError(
                "AdaScale: the pipeline does not measure gradient noise (noise_over=None); "
                "create it with Pipeline(..., noise_over='microbatches')"
            )
        if smoothing is None:
            smoothing = max(0.0, 1.0 - pipe.num_parts / 1000)
        if not 0 <= smoothing < 1:
            raise ConfigError(
                f"AdaScale: smoothing must be at least 0 and below 1, got {smoothing}; for example "
                f"0.9 averages over about ten steps"
            )
        self._pipe, self.smoothing = pipe, smoothing
        self.scale = _checked(scale)
        self.progress = 0.0
        self._before = 0.0
        # Biased averages of v and q, and the sum of their weights.
        self._variance = self._square = self._weight = 0.0

    @property
    def gain(self) -> float:
        """Return how many steps of the base batch the last step was worth; 1 before the first."""
        if not self._weight:
            return 1.0
        variance, square = self._variance / self._weight, self._square / self._weight
        return (variance + square) / (variance / self.scale + square)

    def update(self, result: StepResult, scale: float | None = None) -> float:
        """Update the gain with the gradient noise measured in a step, and return it.

        Every rank must call it once per step, before or after clipping and before the next `step`.
        `scale` is that of this step's batch, if it differs. A skipped step, and one with fewer than
        two parts with samples, leaves the averages unchanged.
        """
        if scale is not None:
            self.scale = _checked(scale)
        if result.parts is None:
            raise ConfigError(
                "AdaScale: update needs the result of a training step, got that of an evaluation; "
                "pass the result of pipe.step"
            )
        total = self._pipe.grad_square()
        mean, num_parts = result.parts.mean_square()
        if num_parts > 1 and not result.is_skipped and isfinite(mean) and isfinite(total):
            # Variance of the batch gradient; that of a base batch is `scale` times as large.
            variance = (mean - total) / (num_parts - 1)
            self._average(max(self.scale * variance, _LEAST_VARIANCE), max(total - variance, 0.0))
        self._before = self.progress
        self.progress += self.gain
        return self.gain

    def rate(self, schedule: Callable[[int], float]) -> float:
        """Return the learning rate for the step passed to `update`.

        `schedule` takes the number of finished steps of the base batch.
        """
        return self.gain * schedule(int(self._before))

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint, as numbers that JSON represents exactly."""
        return {
            "progress": self.progress,
            "variance": self._variance,
            "square": self._square,
            "weight": self._weight,
            "scale": self.scale,
        }

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore a state returned by `state`; raise CheckpointError if its keys differ."""
        expected = self.state()
        if state.keys() != expected.keys():
            raise CheckpointError(
                f"AdaScale: expected a state with keys {', '.join(expected)}, got "
                f"{', '.join(state)}; pass the result of AdaScale.state"
            )
        self.progress = self._before = float(state["progress"])
        self._variance, self._square = float(state["variance"]), float(state["square"])
        self._weight, self.scale = float(state["weight"]), float(state["scale"])

    def _average(self, variance: float, square: float) -> None:
        kept = self.smoothing
        self._variance = kept * self._variance + (1 - kept) * variance
        self._square = kept * self._square + (1 - kept) * square
        self._weight = kept * self._weight + (1 - kept)


def _checked(scale: float) -> float:
    if not (scale > 0 and isfinite(scale)):
        raise ConfigError(
            f"AdaScale: scale must be a finite number above 0, got {scale}; set it to the batch "
            f"size divided by the batch size for which the learning rate was chosen"
        )
    return float(scale)
