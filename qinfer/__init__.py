"""Quantized language models on modest machines: formats, numerics, cache and engine."""

__version__ = "0.1.0"
