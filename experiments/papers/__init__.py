"""Tables of papers: exact figures must be equal, simulated ones are shown next to the paper's."""
