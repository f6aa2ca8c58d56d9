"""Files that survive a kill, files that others may have written, and object stores."""
