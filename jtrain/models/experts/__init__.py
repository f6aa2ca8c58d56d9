"""Mixtures of experts: routing, capacity and dispatch."""
