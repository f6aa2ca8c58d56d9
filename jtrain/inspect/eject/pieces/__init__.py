"""Pieces of an ejected file: modules of jax, optax and numpy alone, read as source.

A constant with a type (`WIDTH: int = 128`) stands for a value of the config. Conditions on such
constants are decided when a file is assembled (`jtrain.inspect.eject.assemble`), and what nothing
uses is left out.
"""
