"""slabd: lends a machine's idle memory in slabs, and takes it back when the machine needs it."""
