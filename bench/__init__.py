"""Benchmarks: ratios against a named alternative in the same run, medians of repeats."""
