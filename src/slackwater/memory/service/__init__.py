"""A device as a process: what it exports, tells and measures."""
