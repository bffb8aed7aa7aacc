# %% [markdown]
# # 15. A failing rank
#
# *Counted, and measured on your machine. About a minute.*
#
# In a job of thousands of GPUs a failure every few hours is normal. The other ranks then wait for
# messages that never come. A training system has to notice it, say what happened, and go on from
# a *checkpoint*: a copy of weights and optimizer state on disk.
#
# ## Predict
#
# Two ranks train, each holding half of the model. They save a checkpoint every 5 steps. During
# step 8 rank 1 is killed (SIGKILL, as when a machine runs out of memory), so it cannot say
# anything.
#
# 1. How long does rank 0 wait until it stops: a second, 15 seconds, or ten minutes?
# 2. After a restart, how many finished steps have to be done a second time?

# %%
import json
import shutil
from datetime import datetime

from experiments.course.charts import bars
from experiments.course.page import (
    OUT,
    ROOT,
    answer,
    check,
    found,
    picture,
    predict,
    quartiles,
    run,
    spread,
)

mine = predict("Seconds until rank 0 stops; steps to be repeated:")

# %% [markdown]
# ## Run
#
# The model of this exercise, `programs/failing.py`, kills its own process on rank 1. We let it
# happen three times, in three run folders.

# %%
EVERY = 5
settings = (
    "model=own model._target_=experiments.course.programs.failing.build data=synthetic_vectors "
    "pipeline.partition=uniform pipeline.recompute=never pipeline.microbatches=4 train.steps=12 "
    f"lr.warmup_steps=2 checkpoint.every={EVERY}"
)
waits = []
for number in range(3):
    folder = OUT / f"15_failing_rank_{number}"
    shutil.rmtree(folder, ignore_errors=True)
    command = f"gpipe_hpc.train {settings} run.dir={folder.relative_to(ROOT)}"
    text = run(command, ranks=2, lines="is killed at|ERROR rank 0", may_fail=True)
    killed = float(found(r"rank 1 is killed at ([\d.]+)", text))
    stamp = datetime.fromisoformat(found(r"^(\S+ \S+) ERROR rank 0", text).replace(",", "."))
    stopped = stamp.timestamp()
    waits.append(stopped - killed)
    found("(rank 1 .*SIGKILL)", text)  # the message names the rank and the signal

# %% [markdown]
# Now the last of these runs goes on, here on one rank that holds the whole model: the same
# command, without `torchrun`, which started the two ranks. A checkpoint holds layers, not ranks,
# so any number of ranks can load it.

# %%
before = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
text = run(command, lines="resumed|ranks before|step +12/")
done = int(found(r"(\d+) steps done", text))

# %% [markdown]
# ## The picture, in words
#
# Two bars. The first one shows the seconds from the kill until rank 0 logged the reason and
# stopped, the median of three, with a short line from the first to the third quartile. It is far
# shorter than the second one, the 15 seconds after which a silent rank counts as lost.

# %%
rows = {"rank 0 stopped after": quartiles(waits), "limit for a silent rank": 15.0}
picture("15_failing_rank", bars("From the kill to the end of rank 0", "s", rows))

# %% [markdown]
# ## The answer

# %%
finished = max(line["step"] for line in before)
check("the last finished step", finished, 7)
check("steps done after the restart", done, 7 // EVERY * EVERY)
answer(f"{spread(waits, 's')}; {finished - done} finished steps are repeated", mine)

# %% [markdown]
# A killed process cannot send a message. But each rank has a helper process on the same host,
# which asks the operating system whether the rank still lives, and tells the other ranks. The
# limit of 15 seconds (`comm.silence_s`) is for a rank that is frozen, or a machine that lost
# power: then nobody is left to tell. The message names the rank, the signal and the last action,
# because with a thousand ranks the first question is which one it was. (It counts steps from 0:
# its step 7 is our step 8.) Steps 6 and 7 were finished but not saved, so they are repeated; step
# 8 never ended. On average half of `checkpoint.every` steps are lost at each failure.
#
# ## Change one thing
#
# Set `EVERY = 2`. How many finished steps are repeated now? (One: step 7.) It has a price: each
# step that writes a checkpoint waits for it. The log says for how long; with large models it is
# more than here.
#
# ## If the number does not come out
#
# The steps never change. The seconds do: on a busy machine or a single core they may become
# several seconds, but not minutes. If the exercise fails because it finds no "rank 1 is killed
# at", training did not reach step 8: read the output that it prints. `git` is not used. Run
# folders are in `experiments/course/out`; this exercise begins by removing its own three.
