"""Layers that networks are made of."""
