"""Texts for people: safe on a terminal, without credentials, in readable units."""
