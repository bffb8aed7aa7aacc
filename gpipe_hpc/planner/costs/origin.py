"""Check that a file of measured times was made on a device like this machine's."""

from pathlib import Path

from gpipe_hpc.errors import ConfigError


def device_warnings(
    setting: str, path: str | Path, kind: str, measured: str, here: str | None, remedy: str
) -> list[str]:
    """Return warnings if a file was measured on a device unlike this machine's.

    Args:
      measured: name of the device in the file, empty if the file does not contain it.
      here: name of this machine's device of the same `kind`, None if it has none. Planning for
        other machines is allowed, with a warning.

    Raises ConfigError if both names are known and differ.
    """
    if not measured:
        return [
            f"{setting}: {path} does not contain the name of the {kind} on which it was measured; "
            f"times may differ on this one"
        ]
    if here is None:
        return [
            f"{setting}: {path} was measured on {measured}, and this machine has no {kind}: the "
            f"plan is valid only for ranks on {measured}"
        ]
    if measured != here:
        raise ConfigError(
            f"{setting}: {path} was measured on another {kind}, {measured}; this machine has "
            f"{here}; {remedy}"
        )
    return []
