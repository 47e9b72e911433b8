"""Judges exported weights: tasks of the lm-evaluation-harness, and samples."""
