"""One folder for each published claim or comparison: what it shows, one command, what it gave."""
