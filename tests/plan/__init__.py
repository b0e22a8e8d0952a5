"""Tests are packages, so that two folders may hold files of one name."""
