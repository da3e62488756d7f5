"""Slackwater puts a deep-learning cluster's slack to work.

What a training program imports is here; the system itself lives in the folders that
`schemas`, `common`, `services` and `loadgen` point to.
"""
