"""Accelerate from a recipe."""
