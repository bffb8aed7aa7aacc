# %% [markdown]
# # 2. Data parallelism and the cost of an all-reduce
#
# *Counted: the same numbers on every machine. Twenty seconds.*
#
# In *data parallelism* each of R processes, called *replicas*, holds the whole model. Each takes
# its share of the batch and computes its own gradients. Before the optimizer's step the replicas
# need the sum of all gradients. The operation that adds up an array over all processes and gives
# every process the sum is called an *all-reduce*.
#
# The simplest way is a server: each replica sends its n bytes of gradients to one process, which
# adds them up and sends the sum back. That process receives R n bytes and sends R n bytes. A
# better way is a *ring*: the array is cut into R pieces, and the pieces travel around the ring of
# replicas, first to be added up, then to be handed out.
#
# ## Predict
#
# The model has 875,264 parameters of 4 bytes, so n = 3.5 MB. With 2 replicas in a ring each one
# sends 3.5 MB in a step. How many megabytes does each one send with 16 replicas: eight times as
# many, about twice as many, or as many as before?

# %%
from experiments.course.charts import bars
from experiments.course.page import answer, check, found, in_bytes, picture, predict, run

mine = predict("MB that each of 16 replicas sends in a step:")

# %% [markdown]
# ## Run
#
# The command `plan` builds no model; it counts. Here `pipeline.stages=1` says that each replica
# is one process. We also say that a link carries 12.5 MB in a second (100 Mbit/s).

# %%
WIDTH = 128
sent = {}
for replicas in (2, 4, 16):
    text = run(
        f"gpipe_hpc.plan model=gpt data=synthetic model.width={WIDTH} pipeline.stages=1 "
        f"pipeline.replicas={replicas} pipeline.microbatches=1 plan.link_bytes_per_s=12.5e6",
        lines="^Over copies|layers, .* parameters",
    )
    sent[replicas] = in_bytes(found(r"each rank sends ([\d.]+ \w+)", text))

# %% [markdown]
# ## The picture, in words
#
# Three bars: the megabytes that each replica sends with 2, 4 and 16 replicas. The second bar is
# 1.5 times as long as the first one. The third bar is almost twice as long as the first one,
# although there are eight times as many replicas.

# %%
rows = {f"{replicas} replicas": megabytes / 1e6 for replicas, megabytes in sent.items()}
picture("02_data_parallelism", bars("Sent by each replica in a step", "MB", rows))

# %% [markdown]
# ## The answer

# %%
n = 4 * in_bytes(found("([\\d,]+) parameters", text))
for replicas, num_bytes in sent.items():
    formula = 2 * (replicas - 1) / replicas * n
    check(f"bytes with {replicas} replicas", num_bytes, formula, tolerance=0.005)
answer(f"{sent[16] / 1e6:.2f} MB with 16 replicas, {sent[2] / 1e6:.2f} MB with 2", mine)

# %% [markdown]
# A piece has n / R bytes. It travels R - 1 hops to be added up and R - 1 hops to be handed out,
# so each replica sends 2 (R - 1) / R x n bytes. That is n for two replicas and tends to 2 n for
# many. So the bytes hardly grow with the number of replicas. But they do grow with the model, and
# they do not shrink when each replica has less to compute: with 12.5 MB/s the all-reduce takes
# 0.28 s with 2 replicas and 0.53 s with 16, whether the step computes for an hour or for a
# millisecond.
#
# ## Change one thing
#
# Set `WIDTH = 256`, the length of the vectors between the layers. The model has almost four times
# as many parameters: 3,323,392. How many megabytes does each of 16 replicas send? (2 x 15 / 16 x
# 13.3 MB = 24.9 MB: almost four times as many.)
#
# ## If the number does not come out
#
# Nothing is measured here, so a busy machine or a single core only makes the command slower, and
# `git` is not needed. If you predicted 28 MB, you let the bytes grow with the number of replicas,
# as they do for a server: with 16 replicas it receives 16 n, 56 MB. If you predicted 3.5 MB: with
# 2 replicas only half of the array travels in each of the two passes, with 16 almost all of it.
# What is not counted here is the time that each message takes however small it is. Exercise 3
# measures it.
