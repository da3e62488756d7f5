"""Replay of workloads against a live cluster: submit on time, watch, measure, report."""
