"""Pages of a device: where each one is, and how it is read and written."""
