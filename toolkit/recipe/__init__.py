"""The recipe: schema, checks and loading. Imports nothing heavy."""
