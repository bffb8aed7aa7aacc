"""The one form in which a setting is refused."""

from gpipe_hpc.errors import ConfigError


def refuse(setting: str, expected: str, got: object, remedy: str) -> ConfigError:
    """Return the error that names a setting, what was expected of it and what to do."""
    return ConfigError(f"config: bad {setting}, expected {expected}, got {got!r}; {remedy}")
