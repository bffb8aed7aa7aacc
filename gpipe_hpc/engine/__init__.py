"""The engine: it runs a rank's list of actions on its stages.

A micro-batch goes one way, downwards: `pipeline`, `steps` (a whole step of a rank), `executor` (its
list of actions), `stage_runner` (forward, recomputation and backward of one stage), `layer_runner`
(consecutive layers), the layer. Each action is handed one frozen `run.Run`.

- `random_state`, `buffers`: what a forward changes besides its output, kept apart by micro-batch.
- `outputs`: what leaves a stage, in memory of its own.
- `offload`: activations that wait in the host's memory.
- `backward/`: a backward in one piece, or split in I and W.
- `stages/`: what a rank has for good, made once at the start.
- `buffer_sync`, `parameters`: buffers and parameters that copies of a stage must have in common.
- `sums/`: what is added up over micro-batches, ranks and replicas.
- `batch/`: batches cut into micro-batches, and outputs put together again.
- `recorder`: when actions ran.
"""
