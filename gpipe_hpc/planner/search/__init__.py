"""Search for the best layout: bound many candidates, then lay out and simulate the best ones."""
