"""Worker process for indexing: reads tasks as lines of JSON and writes their results."""

import json
import sys
from typing import Any, BinaryIO

from gpipe_hpc.data.indexing.lines import scan_lines
from gpipe_hpc.data.indexing.parts import IndexPart, write_part
from gpipe_hpc.data.indexing.tar import scan_tar
from gpipe_hpc.device.cores.inherited import use_inherited_cpus


def do(task: dict[str, Any]) -> IndexPart:
    """Run an indexing task; raise OSError if a file cannot be read."""
    match task:
        case {"scan": "lines", **keywords}:
            return scan_lines(**keywords)
        case {"scan": "tar", **keywords}:
            return scan_tar(**keywords)
    raise ValueError(f"unknown task {task}")


def serve(tasks: BinaryIO, parts: BinaryIO) -> None:
    """Run tasks until the input ends; an OSError is reported in the `facts` of the result."""
    for line in tasks:
        try:
            part = do(json.loads(line))
        except OSError as error:
            part = IndexPart({}, {"errno": error.errno, "error": error.strerror or str(error)})
        write_part(parts, part)


if __name__ == "__main__":
    use_inherited_cpus()
    serve(sys.stdin.buffer, sys.stdout.buffer)
