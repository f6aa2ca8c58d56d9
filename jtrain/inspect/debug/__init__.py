"""Debugging of runs: dry runs, eager steps, overfitting, nonfinite values, replays, differences."""
