"""Scripts that rerun published experiments and put our figures beside the published ones."""
