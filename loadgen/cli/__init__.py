"""The commands of `loadgen`."""
