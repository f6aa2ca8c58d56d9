"""Plan of a run on servers, which all of its processes derive from the same config."""
