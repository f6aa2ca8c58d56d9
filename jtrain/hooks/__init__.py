"""Hooks: they observe a run and change nothing."""
