"""Sweeps: several runs of one config that differ in their settings, by a grid or a search."""
