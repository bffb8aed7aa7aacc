"""`python -m gpipe_hpc.export run.dir=FOLDER`: export the weights of a run as safetensors.

Exports the newest checkpoint, or that of `checkpoint.resume`, to `export.out`, by default
`run.dir/exported/<checkpoint>`. Code named in the run folder is not executed: see `export.trust`.
"""

import os
import sys
from itertools import count
from pathlib import Path
from typing import Any

from gpipe_hpc.comm.collectives.group import SoloGroup
from gpipe_hpc.config import CommandJob, ExitCode, build_stored_model, print_error, run_jobs
from gpipe_hpc.errors import ConfigError, GpipeError, os_remedy
from gpipe_hpc.export.checkpoints import export_checkpoint
from gpipe_hpc.models import normalise_layers
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.run.folder import Checkpoints
from gpipe_hpc.trainer.run.resuming import newest_intact
from gpipe_hpc.yaml_files import read_yaml


def main() -> None:
    """Compose the settings from the command line, export, and exit.

    Exit codes: 0 done, 1 failed, 2 settings that cannot work. A sweep (-m) exits with the first
    code that is not 0.
    """
    sys.exit(run_jobs(_task, "export", unshared="export.out"))


def _task(job: CommandJob) -> int:
    try:
        print(f"exported {export_run(job.config)}")
    except GpipeError as error:
        return print_error(error)
    return ExitCode.DONE


def export_run(config: Config) -> Path:
    """Export a checkpoint of the run in `run.dir`; return the new folder.

    Raises ConfigError if there is no run or checkpoint, or if its model is built by a function
    outside this package and not trusted. Raises the errors of `export_checkpoint`.
    """
    if config.run.dir is None:
        raise ConfigError("export: expected the folder of a run, got none; set run.dir=FOLDER")
    folder = Path(config.run.dir)
    settings = folder / "config.yaml"
    model = _stored_model(settings)
    checkpoint = newest_intact(
        Checkpoints(folder, keep=1), config.checkpoint.resume, False, SoloGroup(0), 0
    )
    if checkpoint is None:
        raise ConfigError(
            f"export: {folder} has no checkpoint in its checkpoints/; set checkpoint.resume to "
            "the path of one"
        )
    built = build_stored_model(model, str(settings), trusts=config.export.trust)
    layers = normalise_layers(built)
    target = folder / "exported" / checkpoint.path.name
    if config.export.out:
        target = Path(config.export.out)
    if os.path.lexists(target):
        raise ConfigError(
            f"config: bad export.out, expected a new folder, got {target}, which exists; remove "
            f"it, or set export.out={_free_name(target)}"
        )
    return export_checkpoint(
        checkpoint, layers, target, dtype=config.export.dtype, prefix=config.export.prefix
    )


def _free_name(taken: Path) -> Path:
    """Return an unused path similar to one that exists."""
    numbered = (taken.with_name(f"{taken.name}_{number}") for number in count(2))
    return next(path for path in numbered if not os.path.lexists(path))


def _stored_model(settings: Path) -> dict[str, Any]:
    """Return the model settings of the run, with interpolations unresolved."""
    try:
        told = read_yaml(settings)
        model = told.get("model") if isinstance(told, dict) else None
        if not isinstance(model, dict):
            raise ValueError(f"model is a {type(model).__name__}")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"export: {settings.parent} is not a run folder; its config.yaml cannot be used: "
            f"{type(error).__name__}: {error}; {os_remedy(error) or 'correct run.dir'}"
        ) from error
    return {str(name): value for name, value in model.items()}


if __name__ == "__main__":
    main()
