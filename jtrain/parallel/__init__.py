"""Strategies: where arrays live, and who sums the gradients."""
