"""Attention over sequences that are split over devices."""
