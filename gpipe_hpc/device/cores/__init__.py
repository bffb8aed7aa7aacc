"""Which of a machine's cores each of its ranks computes on, and with how many threads."""
