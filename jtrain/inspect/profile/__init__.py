"""Profiles of runs: what the devices did in a window of steps, and what the host did meanwhile."""
