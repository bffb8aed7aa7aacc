"""Search for the fastest action order under given costs, and lower bounds on the step time."""
