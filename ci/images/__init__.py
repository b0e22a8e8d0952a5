"""Builds docker/Dockerfile on a base image of this machine's own and runs the results. Knows no kernel and no test of the package."""
