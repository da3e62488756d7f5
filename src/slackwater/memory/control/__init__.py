"""Decide which slabs back which spans, when they move, and which lender is asked."""
