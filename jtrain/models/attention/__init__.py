"""Attention: kernels, masks, rotary positions and the cache of keys and values."""
