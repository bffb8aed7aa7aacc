"""Training command: run folders and resuming, the step loop, metrics, traces and reports."""
