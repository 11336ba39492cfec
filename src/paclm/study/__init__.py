"""Experiments on the mechanism, in the curator's research mode. Nothing made here is private."""
