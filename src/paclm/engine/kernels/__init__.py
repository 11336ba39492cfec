"""Triton kernels of the decode step. Imported on CUDA only; each has a plain twin in `paclm.engine.stacked`."""
