"""Composition of settings with Hydra, checks, errors, help, and exit codes of commands.

Names are imported on first use, because the library needs parts of this package without Hydra.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipe_hpc.config.checks import (
        check_config,
        check_drawing,
        check_planning,
        check_timing,
        filled,
        num_planned_ranks,
        on_ranks,
        portions_of,
    )
    from gpipe_hpc.config.commands import CommandJob, ExitCode, print_error, run_jobs
    from gpipe_hpc.config.compose import compose_config, conf_dir, config_yaml, written
    from gpipe_hpc.config.help import list_of_commands
    from gpipe_hpc.config.keywords import Keywords, by_keyword
    from gpipe_hpc.config.removed import REMOVED
    from gpipe_hpc.config.targets import (
        bind_loss,
        build_stored_model,
        build_target,
        locate,
        own_call,
    )

__all__ = [
    "REMOVED",
    "CommandJob",
    "ExitCode",
    "Keywords",
    "bind_loss",
    "build_stored_model",
    "build_target",
    "by_keyword",
    "check_config",
    "check_drawing",
    "check_planning",
    "check_timing",
    "compose_config",
    "conf_dir",
    "config_yaml",
    "filled",
    "list_of_commands",
    "locate",
    "num_planned_ranks",
    "on_ranks",
    "own_call",
    "portions_of",
    "print_error",
    "run_jobs",
    "written",
]

_HOMES = (
    ("checks", "check_config check_drawing check_planning check_timing"),
    ("checks", "filled num_planned_ranks on_ranks portions_of"),
    ("commands", "CommandJob ExitCode print_error run_jobs"),
    ("compose", "compose_config conf_dir config_yaml written"),
    ("removed", "REMOVED"),
    ("help", "list_of_commands"),
    ("keywords", "Keywords by_keyword"),
    ("targets", "bind_loss build_stored_model build_target locate own_call"),
)


def __getattr__(name: str) -> Any:
    for module, names in _HOMES:
        if name in names.split():
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
