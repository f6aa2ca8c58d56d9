"""The flax modules that configs describe."""
