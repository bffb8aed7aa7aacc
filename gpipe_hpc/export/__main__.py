"""`python -m gpipe_hpc.export run.dir=FOLDER`: the weights of a run as safetensors.

Takes the newest checkpoint, or the one of `checkpoint.resume`, and writes
`run.dir/exported/<checkpoint>`.
"""

import sys
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpipe_hpc.config import Config, build_target
from gpipe_hpc.config.commands import DONE_EXIT_CODE, Job, run_jobs, say_error
from gpipe_hpc.errors import ConfigError, GpipeError
from gpipe_hpc.export.checkpoints import export_checkpoint
from gpipe_hpc.models import normalise_layers
from gpipe_hpc.training.run_folder import Checkpoints


def main() -> None:
    """Compose the settings from Hydra's command line, export, and exit.

    Exit codes: 0 done, 1 failed, 2 settings that cannot work. Of a sweep (-m) the first that is
    not 0.
    """
    sys.exit(run_jobs(_task))


def _task(job: Job) -> int:
    try:
        print(f"exported {export_run(job.config)}")
    except GpipeError as error:
        return say_error(error)
    return DONE_EXIT_CODE


def export_run(config: Config) -> Path:
    """Export a checkpoint of the run in `run.dir`; return the folder.

    Raises ConfigError where there is no run or checkpoint, and as `export_checkpoint`.
    """
    if config.run.dir is None:
        raise ConfigError("export: expected the folder of a run, got none; set run.dir=FOLDER")
    folder = Path(config.run.dir)
    settings = folder / "config.yaml"
    try:
        model = OmegaConf.to_container(OmegaConf.load(settings).model)
        assert isinstance(model, dict), f"model is a {type(model).__name__}"
    except (OSError, OmegaConfBaseException, AttributeError) as error:
        raise ConfigError(
            f"export: {folder} is no run, expected its config.yaml, got {type(error).__name__}: "
            f"{error}; correct run.dir"
        ) from error
    checkpoint = Checkpoints(folder, keep=1).resume_from(config.checkpoint.resume)
    if checkpoint is None:
        raise ConfigError(
            f"export: {folder} has no checkpoint, expected one in its checkpoints/, got none; set "
            f"checkpoint.resume to the path of one"
        )
    layers = normalise_layers(build_target("model", {str(k): v for k, v in model.items()}))
    target = folder / "exported" / checkpoint.name
    return export_checkpoint(checkpoint, layers, target, dtype=config.export.dtype)


if __name__ == "__main__":
    main()
