"""Entry point of `python -m gpipe_hpc.report`."""

import sys
from pathlib import Path

from gpipe_hpc.config import CommandJob, ExitCode, print_error, run_jobs
from gpipe_hpc.errors import ConfigError, GpipeError, os_remedy
from gpipe_hpc.report.html import render_page
from gpipe_hpc.report.markdown import render_markdown
from gpipe_hpc.report.record import read_record
from gpipe_hpc.report.sections import report_of, report_of_several
from gpipe_hpc.settings import Config


def main() -> None:
    """Compose the settings from Hydra's command line, write the report, and exit.

    Exit codes: 0 done, 1 failed, 2 invalid settings. A sweep (-m) exits with the first code that is
    not 0.
    """
    sys.exit(run_jobs(_task, "report", unshared="report.out"))


def _task(job: CommandJob) -> int:
    try:
        print(f"wrote {write_report(job.config)}")
    except GpipeError as error:
        return print_error(error)
    return ExitCode.DONE


def write_report(config: Config) -> Path:
    """Write the report of `run.dir` or of `report.runs`; return its path.

    Raises ConfigError if a folder contains no run, or the file cannot be written.
    """
    config.check_values()
    config.report.check(config.run.dir)
    settings = config.report
    folders = [Path(each) for each in settings.runs or [config.run.dir or ""]]
    records = [read_record(folder) for folder in folders]
    report = report_of_several(records) if settings.runs else report_of(records[0])
    path = Path(settings.out) if settings.out else folders[0] / "report.html"
    is_markdown = path.suffix.lower() == ".md"
    _write(path, render_markdown(report) if is_markdown else render_page(report))
    return path


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(
            f"config: cannot write report.out={path} ({error.strerror}); "
            f"{os_remedy(error) or 'set report.out=FILE'}"
        ) from error


if __name__ == "__main__":
    main()
