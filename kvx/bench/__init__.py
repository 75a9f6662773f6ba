"""Measurements: pure functions that return what they measured as JSON values."""
