"""What `loadgen` does: replays workloads against live clusters, simulates them at trace scale,
generates them."""

from slackwater.cli.program import program

app = program(
    "Make workloads for Slackwater: live replay, memory, simulation, generation.",
    {
        "demo": "slackwater.cli.demo:show",
        "experiment": "slackwater.cli.experiment:play",
        "replay": "slackwater.cli.replay:replay",
        "memory": "slackwater.cli.memory_workloads:memory",
        "simulate": "slackwater.loadgen.simulator.command:simulate_command",
        "audit": "slackwater.loadgen.simulator.command:audit_command",
        "generate": "slackwater.cli.generating:generate",
        "completion": "slackwater.cli.completion:completion",
    },
)
