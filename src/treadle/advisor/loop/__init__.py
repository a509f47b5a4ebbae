"""Recorded workloads, and trials of findings with them on a copy of the data."""
