"""Facts: what happened, as a read model and as sentences."""
