"""Batches: which rows of a source make up the batch of a step, read ahead and sharded."""
