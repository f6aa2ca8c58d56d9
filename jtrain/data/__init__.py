"""Data as numpy arrays: sources of rows, and batches as a function of the step."""
