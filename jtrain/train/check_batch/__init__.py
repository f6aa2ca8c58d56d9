"""Checks of a run's first batch, before anything trains on it."""
