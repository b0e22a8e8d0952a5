"""Adapters to model libraries. None of them imports its library before it is asked to register with it."""
