"""Files that outlive a kill, files that others may have put there, and object stores."""
