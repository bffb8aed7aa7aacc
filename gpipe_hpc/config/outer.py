"""The settings of the group `outer` as the engine takes them."""

from dataclasses import fields

from gpipe_hpc.config.schema import OuterConfig
from gpipe_hpc.engine.outer.settings import Outer


def outer_of(config: OuterConfig) -> Outer:
    """Return them; raises ConfigError for what cannot be, alone or together."""
    settings = vars(config)
    return Outer(**{n: settings[n] for n in (each.name for each in fields(Outer)) if n in settings})
