"""Nouns that a service shares with its client or with the simulator."""
