"""Parts that the commands of `slackwater` and `loadgen` share."""
