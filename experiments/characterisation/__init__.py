"""The literature's characterisations on one machine: batch, threads, processes, backend."""
