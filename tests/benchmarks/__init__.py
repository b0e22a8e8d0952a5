"""Tests of the programs in benchmarks/, without a GPU."""
