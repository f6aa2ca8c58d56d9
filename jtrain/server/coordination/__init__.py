"""Coordination of the workers in the run's own process, one module for each order of steps."""
