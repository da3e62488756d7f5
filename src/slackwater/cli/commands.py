"""The commands of `slackwater`, and where each is written."""

from slackwater.console.program import program

app = program(
    "Put a deep-learning cluster's slack to work: run the services, submit jobs, see what they do.",
    {
        "up": "slackwater.cli.up:up",
        "down": "slackwater.cli.machine:down",
        "status": "slackwater.cli.machine:status",
        "run": "slackwater.cli.serve:serve",
        "submit": "slackwater.cli.submit:submit",
        "cancel": "slackwater.cli.operate:cancel",
        "rerun": "slackwater.cli.operate:rerun",
        "delete": "slackwater.cli.operate:delete",
        "wait": "slackwater.cli.wait:wait",
        "jobs": "slackwater.cli.jobs:jobs",
        "job": "slackwater.cli.job:job",
        "events": "slackwater.cli.events:events",
        "logs": "slackwater.cli.logs:logs",
        "aggregators": "slackwater.cli.pool:aggregators",
        "nodes": "slackwater.cli.nodes:nodes",
        "drain": "slackwater.cli.drain:drain",
        "tenants": "slackwater.cli.pool:tenants",
        "policy": "slackwater.cli.policy:app",
        "what-if": "slackwater.cli.what_if:what_if",
        "top": "slackwater.cli.top:top",
        "tap": "slackwater.cli.show:tap",
        "config": "slackwater.cli.config:app",
        "doctor": "slackwater.cli.doctor:doctor",
        "compile": "slackwater.cli.compile:compile_all",
        "completion": "slackwater.console.completion:completion",
        "model": "slackwater.cli.model:app",
        "memory": "slackwater.cli.memory:app",
    },
)
