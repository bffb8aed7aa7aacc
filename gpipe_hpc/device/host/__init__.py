"""Facts about this process and its machine: memory, clock, namespaces, open files."""
