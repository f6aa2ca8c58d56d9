"""Frames over sockets between the processes of a run: sent, answered, sent again."""
