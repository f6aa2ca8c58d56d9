"""Processes of a run: how they meet, exchange data, are watched and are started."""
