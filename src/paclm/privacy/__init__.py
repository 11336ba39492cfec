"""The maths of releases and budgets. Pure functions on float64 arrays: no files, no clock, no torch, no model."""
