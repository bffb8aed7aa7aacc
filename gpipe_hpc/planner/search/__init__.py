"""Which layout is best: many are bounded, the most promising are laid out and simulated."""
