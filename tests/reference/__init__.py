"""Slow, exact twins of the fast code: written for clarity from the formulas, sharing nothing with it."""
