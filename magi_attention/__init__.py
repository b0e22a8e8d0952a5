"""Exact attention for training on very long and irregular sequences, over many GPUs."""
