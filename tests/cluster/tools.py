"""Lookup of the tools that cluster tests need; the error for a missing tool names its package."""

import os
import shutil

# Debian packages of the tools.
PACKAGES = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "munged": "munge",
    "mungekey": "munge",
    "podman": "podman",
    "buildah": "buildah",
    "runc": "runc",
    "debootstrap": "debootstrap",
    "kubectl": "kubectl",  # from https://pkgs.k8s.io, version 1.29 or newer
}
_FOLDERS = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


class MissingToolError(RuntimeError):
    """A tool is not installed on this machine."""


def tool(name: str) -> str:
    """Return the path of a tool, also in /usr/sbin and /sbin, which may not be in PATH."""
    path = shutil.which(name, path=_FOLDERS)
    if path is None:
        raise MissingToolError(
            f"cluster tests: expected {name} on this machine, got none in {_FOLDERS}; install it: "
            f"apt-get install --no-install-recommends {PACKAGES[name]}"
        )
    return path
