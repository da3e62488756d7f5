"""The trace simulator of a GPU cluster."""
