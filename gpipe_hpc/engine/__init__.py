"""The engine: it runs a rank's list of actions on its stages.

A micro-batch goes one way, downwards, through four files: `steps` (a whole step of a rank),
`executor` (its list of actions), `microbatch` (what a stage does with one micro-batch), and above
them all `gpipe_hpc.pipeline`. Each action is handed one frozen `run.Run`, and returns what it made.

- `stages/`: what a rank has for good, made once at the start.
- `layers/`: layers that run together, and what surrounds them while they do.
- `state/`: what layers change besides their output, once a micro-batch: buffers, generators.
- `backward/`: a backward in one piece, or split in I and W.
- `memory/`: what is kept of a micro-batch, where it waits, and when it may be shared.
- `sums/`: what is added up over micro-batches, ranks and replicas.
- `batch/`: batches cut into micro-batches, and outputs put together again.
- `recorder`: when actions ran.
"""
