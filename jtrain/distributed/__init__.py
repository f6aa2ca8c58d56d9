"""Processes: how they meet, what they exchange, how they are watched and started."""
