"""Whether hosts, ranks and what links them are fit for a run: measured, not believed."""
