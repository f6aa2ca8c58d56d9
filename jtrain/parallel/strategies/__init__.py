"""Strategies: how the arrays of a step are split over devices."""
