"""A dashboard in the browser: live from a cluster, and the same page as the file of a report."""
