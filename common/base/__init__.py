"""The floor that everything else stands on: errors, limits, clock, codec, effects, logging."""
