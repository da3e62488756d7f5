"""Remote memory, the client side: pages that live in other machines' idle memory.

See docs/adr/0006-remote-memory.md for the parts and docs/guide/memory.md for its use.
"""
