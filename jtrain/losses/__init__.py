"""Losses: model outputs to Means."""
