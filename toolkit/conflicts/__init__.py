"""Settings that two places state: a recipe, and what other tools read (docs/conflicts.md).

Each kind of place has one small module that reads it into `source.Stated`, in the recipe's
words; `facts.py` says what the recipe and its plan state; `compare.py` judges.
"""
