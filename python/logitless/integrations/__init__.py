"""Faces for other people's code: Hugging Face models, TRL, and functions shaped like verl's, Liger's and CCE's.

Each module imports the package that it serves only when it is imported itself; docs/adopt.md says which line to change.
"""
