"""The exception family of gpipe_hpc.

Users' mistakes raise one of these; broken invariants of our own are plain asserts with a text.
Every message reads ``where: what, expected, got; remedy``.
"""


class GpipeError(Exception):
    """Base of everything that gpipe_hpc raises on purpose."""


class ConfigError(GpipeError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class ScheduleError(GpipeError, ValueError):
    """A schedule table that breaks a rule; names rank, action and reason."""


class PartitionError(ConfigError):
    """A cut of layers into stages that does not fit the model."""


class ModelError(GpipeError, ValueError):
    """A model that is not a sequence of layers we can place, or a layer that cannot be built."""


class DataError(GpipeError):
    """Data that is missing, unreadable or does not match what the model and schedule expect."""


class MissingDataError(DataError, ConfigError):
    """A setting that names files or a folder of data where there are none."""


class CheckpointError(GpipeError):
    """A checkpoint that is missing, incomplete or of another model."""


class RunFolderError(GpipeError):
    """A run folder that another run holds, or that a run cannot go on in as it is asked to."""


class LaunchError(GpipeError, RuntimeError):
    """The ranks could not be brought together; names who is missing."""


class ActionError(GpipeError, RuntimeError):
    """An action of the table failed on this rank; names rank, stage, micro-batch and action."""


class PeerError(GpipeError, RuntimeError):
    """Another rank failed and this one stops because of it; carries the peer's own report."""


class NonFiniteError(GpipeError, ArithmeticError):
    """A loss or a gradient norm is NaN or infinite; names step, rank and micro-batch."""
