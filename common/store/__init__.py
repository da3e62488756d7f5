"""Durable records: key-value buckets with one writing instance each. See `base.Store`."""
