"""Open the data at the start of a run: first on rank 0, then on the other ranks that need it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from gpipe_hpc.comm.watchdog.heartbeat import run_with_heartbeat
from gpipe_hpc.comm.world.groups import check_agreement
from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.data import DataFacts, DataSource, Identity, identify, open_data
from gpipe_hpc.settings import Config

log = logging.getLogger("gpipe_hpc.train")

INDEX_FOLDER: Final = "index"
"""Folder within the run folder for indices of data in read-only folders."""


class OpenedData(NamedTuple):
    """The opened data and facts about it; `source` is None on ranks that have not opened the data.

    `baseline`, the loss of a trivial prediction, is only known on rank 0.
    """

    source: DataSource | None
    facts: DataFacts
    identity: Identity
    baseline: float | None


def open_data_first(
    config: Config, world: World, folder: Path, check: Callable[[Identity], None]
) -> OpenedData:
    """Open the data on rank 0 and broadcast facts about it. Collective.

    Other ranks open the data later if they need it: on a cluster, a thousand ranks would list the
    same folders. `check` is called on rank 0 with the data's identity and may raise an error.
    """

    def first() -> OpenedData:
        source, facts = _open(config, folder)
        counts = f"{source.train.num_samples:,} training samples, "
        counts += f"{source.validation.num_samples:,} validation samples"
        log.info("data: %s", source.about or counts)
        # Having no validation samples is intended only if the fraction was set to 0.
        is_chosen = getattr(config.data, "validation_fraction", None) == 0
        if not source.validation.num_samples and not is_chosen:
            log.warning(
                "data: there are no validation samples, so there will be no validation loss; add "
                "data, raise data.validation_fraction, or set it to 0 if that is intended"
            )
        identity = identify(source, config.data, config.train)
        check(identity)
        return OpenedData(source, facts, identity, source.baseline())

    work = first if world.rank == 0 else None
    opened = run_with_heartbeat(world, "opening the data", work, idle_s=config.comm.timeout_s)
    with collective_errors(world, "opening the run"):
        facts: DataFacts = world.world_group.broadcast_object(opened and opened.facts, root=0)
        identity: Identity = world.world_group.broadcast_object(opened and opened.identity, root=0)
    return opened or OpenedData(None, facts, identity, None)


def open_data_where_needed(
    config: Config, world: World, folder: Path, opened: OpenedData, *, is_needed: bool
) -> DataSource | None:
    """Open the data on ranks that need it and have not opened it yet; return it. Collective.

    Raises ConfigError on all ranks if they do not find the same data.
    """
    own = opened.source, opened.facts
    work = (lambda: _open(config, folder)) if is_needed and opened.source is None else None
    source, seen = (
        run_with_heartbeat(world, "opening the data", work, idle_s=config.comm.timeout_s) or own
    )
    with collective_errors(world, "comparing the data"):
        check_agreement(world.world_group, {"data": seen.digests})
    return source


def _open(config: Config, folder: Path) -> tuple[DataSource, DataFacts]:
    """Open the data, using the index that rank 0 has stored."""
    source = open_data(config.data, config.train.seed, folder / INDEX_FOLDER)
    return source, DataFacts.of(source)
