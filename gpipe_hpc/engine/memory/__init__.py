"""Where activations live: what leaves a stage, and what waits in the host's memory."""
