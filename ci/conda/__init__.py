"""Builds recipe/ into a local channel and installs from it, as `conda install` would. Knows no compiler flag and no test of the package."""
