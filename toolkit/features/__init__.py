"""Features of a run, each in a room of its own: what is known about it is there alone."""
