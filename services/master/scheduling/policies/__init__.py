"""GPU-scheduling policies: pure functions of a snapshot, used by the live master and by
`loadgen simulate` alike. `view` is what a policy sees and says, `registry` its name."""
