"""Tests of ci/kernel_build, which compiles the CUDA kernels."""
