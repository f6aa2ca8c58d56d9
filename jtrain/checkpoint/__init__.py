"""Save, restore and find the states of a run."""
