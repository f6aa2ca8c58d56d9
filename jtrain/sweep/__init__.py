"""Several runs of one config that differ in what was typed: a grid, or a search."""
