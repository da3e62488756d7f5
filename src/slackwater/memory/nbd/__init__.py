"""A network block device: the standard protocol, so any client uses remote memory unmodified."""
