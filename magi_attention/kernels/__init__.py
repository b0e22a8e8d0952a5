"""Attention over slices on one device, forward and backward. Knows no ranks, plans or groups."""
