"""The trace-scale simulator: the master's own policies driven from an event heap."""
