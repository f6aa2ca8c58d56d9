"""Slurm on this machine, and trials of runs under it."""
