"""`python -m gpipe_hpc.draw`: draw a schedule as simulated, or a run as measured."""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from gpipe_hpc.config import Config, conf_dir, load_config, register_schemas
from gpipe_hpc.errors import GpipeError
from gpipe_hpc.schedule import Costs, Timeline, build, draw_svg, draw_text, simulate
from gpipe_hpc.training.trace import newest_trace, read_trace

DEFAULT_STAGES = 4


def main() -> None:
    """Compose the settings from Hydra's command line and draw."""
    register_schemas()
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(_task)()


def _task(composed: DictConfig) -> None:
    try:
        config = load_config(composed)
        picture = draw(config)
        if config.draw.out is None:
            print(picture)
        else:
            Path(config.draw.out).write_text(picture, encoding="utf-8")
    except (GpipeError, OSError) as error:
        sys.exit(f"gpipe_hpc: {error}")


def draw(config: Config) -> str:
    """Return the picture: of the newest measured step of run.dir, or of the schedule simulated."""
    timeline = _measured(Path(config.run.dir)) if config.run.dir else _simulated(config)
    unit = "s" if config.run.dir else ""
    if config.draw.format == "svg":
        return draw_svg(timeline, unit=unit)
    return draw_text(timeline)


def _measured(run_folder: Path) -> Timeline:
    return read_trace(newest_trace(run_folder))


def _simulated(config: Config) -> Timeline:
    pipeline, costs = config.pipeline, config.draw.costs
    schedule = build(
        pipeline.schedule,
        ranks=pipeline.stages or DEFAULT_STAGES,
        microbatches=pipeline.microbatches * config.train.accumulation,
        recompute=pipeline.recompute,
        **pipeline.options,
    )
    return simulate(
        schedule,
        Costs(
            forward=costs.forward,
            backward=costs.backward,
            recompute=costs.recompute,
            send=costs.send,
        ),
    )


if __name__ == "__main__":
    main()
