"""Server that starts `python -m <module>` repeatedly, with torch imported only once.

Each line of standard input is a request in JSON, each line of standard output a response: `start`
forks a process that becomes the command, `poll` returns its exit code as subprocess does. A process
writes its output to a file of its own. It exits after its atexit functions have run, without
finalizing the interpreter, which would take a quarter of its CPU time; if the request sets
`is_whole`, the interpreter is finalized.
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
    """Make this process run the requested command as if a shell had started it."""
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
    """Run all exit functions, then exit without finalizing the interpreter."""
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
    """Serve requests until standard input ends; in a forked process, return its request."""
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
        import_module(name)  # once, so that forked processes need not import it
    compose_config(["train.steps=1"])  # initializes Hydra's parsers
    gc.collect()
    gc.freeze()  # saves each command a second for collecting torch's objects at exit
    mine = serve()
    if mine is not None:
        become(mine)
