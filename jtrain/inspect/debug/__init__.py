"""Ways to look into a run that does not do what it should."""
