"""Opening the data at the start of a run: rank 0 first, then the others that need them."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from gpipe_hpc.comm.watchdog.patience import patiently
from gpipe_hpc.comm.world.groups import check_agreement
from gpipe_hpc.comm.world.world import World, together
from gpipe_hpc.data import DataFacts, DataSource, Identity, identify, open_data
from gpipe_hpc.settings import Config

log = logging.getLogger("gpipe_hpc.train")

INDEX_FOLDER: Final = "index"
"""The folder of a run for indices of data that lie where nothing can be written."""


class Opened(NamedTuple):
    """What this rank knows of the data; `source` and `baseline` where it has opened them."""

    source: DataSource | None
    facts: DataFacts
    identity: Identity
    baseline: float | None


def open_data_first(
    config: Config, world: World, folder: Path, check: Callable[[Identity], None]
) -> Opened:
    """Open the data on rank 0 and tell the others of them; all ranks call it.

    Elsewhere they are opened only if needed: on a cluster, a thousand ranks would list the same
    folders. `check` may refuse them, on rank 0.
    """

    def first() -> Opened:
        source, facts = _open(config, folder)
        counts = f"{source.train.num_samples:,} training samples, "
        counts += f"{source.validation.num_samples:,} validation samples"
        log.info("data: %s", source.about or counts)
        # Nothing held back is a choice only if the user made it.
        is_chosen = getattr(config.data, "validation_fraction", None) == 0
        if not source.validation.num_samples and not is_chosen:
            log.warning(
                "data: no sample is held back, so there will be no validation loss; give more "
                "data, raise data.validation_fraction, or set it to 0 if that is intended"
            )
        identity = identify(source, config.data, config.train)
        check(identity)
        return Opened(source, facts, identity, source.baseline())

    work = first if world.rank == 0 else None
    opened = patiently(world, "opening the data", work, idle_s=config.comm.timeout_s)
    with together(world, "opening the run"):
        facts: DataFacts = world.everybody.broadcast_object(opened and opened.facts, root=0)
        identity: Identity = world.everybody.broadcast_object(opened and opened.identity, root=0)
    return opened or Opened(None, facts, identity, None)


def open_data_where_needed(
    config: Config, world: World, folder: Path, opened: Opened, *, is_needed: bool
) -> DataSource | None:
    """Return the data on the ranks that have opened them or need them; all ranks call it.

    Raises ConfigError on all of them if they do not find the same data.
    """
    own = opened.source, opened.facts
    work = (lambda: _open(config, folder)) if is_needed and opened.source is None else None
    source, seen = patiently(world, "opening the data", work, idle_s=config.comm.timeout_s) or own
    with together(world, "comparing the data"):
        check_agreement(world.everybody, {"data": seen.digests})
    return source


def _open(config: Config, folder: Path) -> tuple[DataSource, DataFacts]:
    """Open the data, by the index that rank 0 has kept where the data are large."""
    source = open_data(config.data, config.train.seed, folder / INDEX_FOLDER)
    return source, DataFacts.of(source)
