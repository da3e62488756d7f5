"""How a job progresses on the GPUs it holds: one module per model, all behind `base.JobModel`."""
