"""Calls of the compiled step: how many steps each takes, its program, and its batches."""
