"""Shards of the state on servers: how it is cut, how pushes are encoded, applied and counted."""
