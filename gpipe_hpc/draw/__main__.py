"""The entry point of `python -m gpipe_hpc.draw`."""

import sys

import hydra
from omegaconf import DictConfig

from gpipe_hpc.config import conf_dir, load_config, register_schemas
from gpipe_hpc.draw.pictures import draw, put
from gpipe_hpc.errors import GpipeError


def main() -> None:
    """Compose the settings from Hydra's command line and draw."""
    register_schemas()
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(_task)()


def _task(composed: DictConfig) -> None:
    try:
        config = load_config(composed)
        put(draw(config), config.draw.out)
    except (GpipeError, OSError) as error:
        sys.exit(f"gpipe_hpc: {error}")


if __name__ == "__main__":
    main()
