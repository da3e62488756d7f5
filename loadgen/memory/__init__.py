"""Workloads for remote memory, and the checker that remembers every page."""
