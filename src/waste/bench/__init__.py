"""Measurements of a running model, and what can be learned from them without it."""
