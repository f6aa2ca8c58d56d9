"""Engines: they start the processes of a run on this machine, by Ray or by a launcher."""
