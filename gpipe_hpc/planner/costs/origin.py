"""Whether what a file keeps was measured on a device like the one that is here."""

from pathlib import Path

from gpipe_hpc.errors import ConfigError


def doubts_of_device(
    setting: str, path: str | Path, kind: str, measured: str, here: str | None, remedy: str
) -> list[str]:
    """Return warnings about the device on which a file was measured.

    `measured`: what that device is called, empty where the file does not tell. `here`: what this
    machine's device of the same `kind` is called, None where it has none: planning for other
    machines is allowed, and only warned of. Raises ConfigError where both are known and differ.
    """
    if not measured:
        return [
            f"{setting}: {path} does not say on which {kind} it was measured, and another may take "
            f"other times"
        ]
    if here is None:
        return [
            f"{setting}: {path} was measured on {measured}, and this machine has no {kind}: it "
            f"counts for ranks on {measured} alone"
        ]
    if measured != here:
        raise ConfigError(
            f"{setting}: {path} is of another {kind}, expected one measured on {here}, which this "
            f"machine has, got one of {measured}; {remedy}"
        )
    return []
