"""Adapters: a model of any framework as the two pure functions of a `Model`."""
