"""Tests of the builds and of what they publish."""
