"""A script that starts `python -m <module>` again and again, with torch loaded once.

One request a line of JSON on standard input, one answer a line on standard output: `start` forks
a process that becomes the command, `poll` tells its exit code as subprocess does. The process has
no child of its own and its own file for output. It leaves once all has run that is registered for
the end: taking an interpreter with torch apart would be a quarter of its processor time. Where a
request says `is_whole` it ends as an interpreter ends.
"""

import atexit
import gc
import json
import os
import runpy
import sys
import threading
from importlib import import_module

from gpipe_hpc.config import compose_config


def become(request):
    """Turn this process into what a shell would have started."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]
    sys.path[1:1] = filter(None, request["environ"].get("PYTHONPATH", "").split(os.pathsep))
    sys.argv[1:] = request["arguments"]
    code = 0
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        if request["is_whole"] or not isinstance(leaving.code, int):
            raise
        code = leaving.code
    if not request["is_whole"]:
        leave(code)


def leave(code):
    """End with what a program and its libraries do at the end, and nothing behind that."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def poll(pid):
    """Return the exit code, negative for a signal, or None while the process runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def serve():
    """Answer until standard input ends; return the request that this process is to become."""
    for line in sys.stdin:
        request = json.loads(line)
        if request["what"] == "start":
            answer = os.fork()
            if answer == 0:
                return request
        else:
            answer = poll(request["pid"])
        print(json.dumps(answer), flush=True)
    return None


if __name__ == "__main__":
    for name in (
        "gpipe_hpc.trainer.command",
        "torch.utils.tensorboard",
        "torch._dynamo",
        "numpy.ma",
        "rich._emoji_codes",
    ):
        import_module(name)  # seconds that no start then pays again
    compose_config(["train.steps=1"])  # nor what Hydra's parsers learn from the first words
    gc.collect()
    gc.freeze()  # else each command, as it ends, looks for garbage in all of torch: a second
    mine = serve()
    if mine is not None:
        become(mine)
