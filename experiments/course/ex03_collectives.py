# %% [markdown]
# # 3. Ring, recursive doubling, tree, hierarchy
#
# *Counted, and measured on your machine. Twenty seconds.*
#
# A message of n bytes takes about alpha + n beta seconds: alpha is the start-up time (the
# *latency*), and 1 / beta is the *bandwidth*. An all-reduce (exercise 2) over p processes, called
# *ranks*, can be built from messages in several ways:
#
# | algorithm | how | time |
# | --- | --- | --- |
# | ring | pieces travel around the ring twice | 2 (p - 1) alpha + 2 (p - 1) / p n beta |
# | recursive doubling | pairs exchange sums, at distances 1, 2, 4 | log2(p) (alpha + n beta) |
# | tree | sums travel up, the total travels down | 2 log2(p) (alpha + n beta) |
# | hierarchy | to the first rank of the host, ring, back | 2 (alpha + n beta) + ring of hosts |
#
# A *host* is a machine with several ranks, here two. The time to add numbers up is left out.
#
# ## Predict
#
# There are p = 4 ranks. Which of ring and recursive doubling is faster for a short array, which
# for a long one? At which n do the formulas give the same time, as a multiple of alpha / beta?

# %%
import json
from statistics import median

from experiments.course.charts import lines
from experiments.course.page import answer, check, picture, predict, run, spread

mine = predict("Faster for short, faster for long, and n in units of alpha / beta:")

# %% [markdown]
# ## Run
#
# `torchrun`, torch's command that starts several processes, starts four. They run all four
# algorithms, written with send and receive, in `programs/algorithms.py`. The hierarchy takes ranks
# 0 and 1 as one host, and ranks 2 and 3 as another. Each result is compared with the right sum. A
# time is that of the slowest rank, in 9 rounds.

# %%
text = run("experiments.course.programs.algorithms", ranks=4, lines="^nothing")
found = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
for entry in found["algorithms"]:
    if entry["bytes"] in (1 << 10, 1 << 22):
        print(f"{entry['name']:20} {entry['bytes']:9,} B  {spread(entry['seconds'], 'ms', 1e3)}")

# %% [markdown]
# We fit alpha and beta to messages between two ranks. Alpha is the time of the shortest message,
# and beta the further time of the longest one for each byte. Both are from the fastest round,
# which other programs disturbed least.

# %%
short, long = found["messages"][0], found["messages"][-1]
alpha = min(short["seconds"])
beta = max((min(long["seconds"]) - alpha) / (long["bytes"] - short["bytes"]), 1e-12)
print(f"messages of 1,024 B: {spread(short['seconds'], 'us', 1e6)}")
print(f"alpha: {1e6 * alpha:.0f} us; bandwidth 1 / beta: {1e-9 / beta:.2f} GB/s")

# %% [markdown]
# ## The picture, in words
#
# Both axes are logarithmic: bytes to the right, milliseconds up. Two lines are the formulas of
# ring and recursive doubling: flat for short arrays, where only alpha counts, then rising. That of
# recursive doubling starts lower; the lines cross at 8 alpha / beta. Markers are measured medians.

# %%
p = found["ranks"]
formulas = {
    "ring, formula": lambda n: 2 * (p - 1) * alpha + 2 * (p - 1) / p * n * beta,
    "doubling, formula": lambda n: 2 * (alpha + n * beta),
}
sizes = [2**k for k in range(10, 27)]
chart = {name: [(n, 1e3 * time(n)) for n in sizes] for name, time in formulas.items()}
for entry in found["algorithms"]:
    point = (entry["bytes"], 1e3 * median(entry["seconds"]))
    chart[entry["name"]] = [*chart.get(entry["name"], []), point]
measured = [name for name in chart if name not in formulas]
picture(
    "03_collectives",
    lines("An all-reduce over 4 ranks", "bytes", "ms", chart, log=True, dots=measured),
)

# %% [markdown]
# ## The answer

# %%
n = found["algorithms"][-1]["bytes"]
counts = {"ring": (6, 1.5 * n), "recursive doubling": (2, 2 * n), "tree": (2, 2 * n)}
for entry in found["algorithms"][-4:-1]:
    messages, sent = counts[entry["name"]]
    check(f"messages that a rank sends at most, {entry['name']}", entry["messages"], messages)
    check(f"bytes that a rank sends, {entry['name']}", entry["sent_bytes"], sent)
answer(
    "by the formulas doubling for short arrays, ring for long ones, the same at 8 alpha / beta = "
    f"{8 * alpha / beta / 1e3:,.0f} kB here",
    mine,
)

# %% [markdown]
# 2 alpha + 2 n beta = 6 alpha + 1.5 n beta gives n = 8 alpha / beta. Below that the few messages
# of recursive doubling win, above it the few bytes of the ring. With more ranks the ring needs
# more messages, 2 (p - 1), and so libraries switch between algorithms by size. The hierarchy pays
# where links between hosts are slower than within: only the first rank of a host uses them. On one
# machine there is no such difference: it takes 4 alpha + 3 n beta here, more than doubling for
# every n.
#
# ## Change one thing
#
# Put p = 64 into both formulas. From which n on is the ring faster? (120 alpha / 4.03 beta: about
# 30 alpha / beta.)
#
# ## If the number does not come out
#
# The counts never change; on a busy machine the times do. With 4 processes on two cores or one,
# ranks take turns, so a message also waits for its receiver to be scheduled. Then measured times
# lie above the lines, often by ten times or more, and the algorithms may change places: what
# counts is then how many messages all ranks send together, 24 for the ring, 8 for doubling and the
# hierarchy, and 6 for the tree. Close other programs and run it again. `git` is not needed.
