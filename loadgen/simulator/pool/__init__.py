"""The aggregation pool at trace scale: `loadgen simulate --pool aggregation`."""
