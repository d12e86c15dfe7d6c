"""Triton kernels for CUDA devices; importing this package alone does not import Triton."""
