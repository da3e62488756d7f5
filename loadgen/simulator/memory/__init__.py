"""Remote memory at the scale of a cluster: `loadgen simulate --pool memory`."""
