"""A user-written table that is loaded from a file and used like a named schedule."""

from dataclasses import replace

from gpipe_hpc.errors import ScheduleError, os_remedy
from gpipe_hpc.schedule.table.lifetimes import bounds_of
from gpipe_hpc.schedule.table.schedule import Schedule
from gpipe_hpc.schedule.table.text_form import from_text
from gpipe_hpc.small_files import read_text


def from_file(ranks: int, microbatches: int, path: str = "") -> Schedule:
    """Load a table from a text file in the format of `to_text`, compute-only or with transfers.

    The file must contain a table of `ranks` ranks and `microbatches` micro-batches.
    """
    if not path:
        raise ScheduleError("schedule 'file': no file is given; set pipeline.options.path")
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise ScheduleError(
            f"schedule 'file': cannot read {path} as a text table: {error}; "
            f"{os_remedy(error) or 'write the file again'}"
        ) from None
    schedule = from_text(text, name=f"file {path}")
    if (schedule.num_ranks, schedule.num_microbatches) != (ranks, microbatches):
        raise ScheduleError(
            f"schedule 'file': {path} is a table of {schedule.num_ranks} ranks and "
            f"{schedule.num_microbatches} micro-batches, but the run has {ranks} ranks and "
            f"{microbatches} micro-batches; change the run or the file"
        )
    return replace(schedule, max_activations=bounds_of(schedule.ranks))
