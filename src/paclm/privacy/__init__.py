"""The mathematics of the release. Pure functions on float64 arrays: no files, no clock, no torch, no model."""
