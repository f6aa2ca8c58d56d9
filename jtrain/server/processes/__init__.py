"""Programs of the servers and workers, and how they find the run."""
