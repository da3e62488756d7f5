"""Arrays larger than memory, paged by userfaultfd."""
