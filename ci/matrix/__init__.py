"""The compatibility matrix: its cells, their environments, what is checked in them, their results. Knows no source of the package."""
