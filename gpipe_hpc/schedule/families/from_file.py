"""A table that the user wrote, as a schedule known by name."""

from dataclasses import replace

from gpipe_hpc.errors import ScheduleError, os_remedy
from gpipe_hpc.schedule.table.lifetimes import bounds_of
from gpipe_hpc.schedule.table.schedule import Schedule
from gpipe_hpc.schedule.table.text_form import from_text
from gpipe_hpc.small_files import read_text


def from_file(ranks: int, microbatches: int, path: str = "") -> Schedule:
    """Read the table of a text file, in the form of `to_text`; bare or with its own transfers.

    The file must be a table of `ranks` ranks and `microbatches` micro-batches.
    """
    if not path:
        raise ScheduleError(
            "schedule 'file': which one, expected the option path, got none; set "
            "pipeline.options.path"
        )
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise ScheduleError(
            f"schedule 'file': {path} is not readable, expected a text table, got {error}; "
            f"{os_remedy(error) or 'write it anew'}"
        ) from None
    schedule = from_text(text, name=f"file {path}")
    if (schedule.num_ranks, schedule.num_microbatches) != (ranks, microbatches):
        raise ScheduleError(
            f"schedule 'file': {path} is a table of {schedule.num_ranks} ranks and "
            f"{schedule.num_microbatches} micro-batches, expected {ranks} ranks and {microbatches} "
            "micro-batches; change them, or the file"
        )
    return replace(schedule, max_activations=bounds_of(schedule.ranks))
