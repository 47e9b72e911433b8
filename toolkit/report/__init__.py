"""What a run directory says about its run, without torch."""
