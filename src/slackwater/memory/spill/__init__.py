"""Blobs that do not fit into memory."""
