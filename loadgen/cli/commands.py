"""The commands of `loadgen`: replay workloads against live clusters, simulate them at trace scale,
generate them."""

from slackwater.console.program import program

app = program(
    "Make workloads for Slackwater: live replay, memory, simulation, generation.",
    {
        "demo": "slackwater.loadgen.cli.demo:show",
        "experiment": "slackwater.loadgen.cli.experiment:play",
        "replay": "slackwater.loadgen.cli.replay:replay",
        "memory": "slackwater.loadgen.cli.memory:memory",
        "simulate": "slackwater.loadgen.cli.simulate:simulate_command",
        "audit": "slackwater.loadgen.cli.simulate:audit_command",
        "compare": "slackwater.loadgen.cli.compare:compare_command",
        "generate": "slackwater.loadgen.cli.generate:generate",
        "completion": "slackwater.console.completion:completion",
    },
)
