"""Compiles csrc/attention into one library with nvcc, for setup.py and ci/compile_kernels.py. Standard library only; knows no torch."""
