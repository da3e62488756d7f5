"""Trains by an Agent, and computes for a while in each iteration.

`STUCK`: it computes for ever in the end. `GOES_WRONG`: in its tenth iteration it pushes what is not
a number (`nan`), asks for more memory than it may have (`memory`) or is killed (`killed`).
"""

import json
import os
import resource
import signal
import time

import numpy as np

from slackwater import Agent

WRONG_AT = 10


def go_wrong() -> float:
    match os.environ.get("GOES_WRONG"):
        case "nan":
            return float("nan")
        case "memory":
            resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
            np.ones(2**30)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    return -1.0


iterations, stuck = int(os.environ["ITERATIONS"]), os.environ.get("STUCK") == "1"
with Agent(tensors={"w": np.zeros(200_000, np.float32)}) as agent:
    while agent.iteration < iterations:
        until_s = time.perf_counter() + 0.01
        while time.perf_counter() < until_s:
            pass
        by = go_wrong() if agent.iteration == WRONG_AT else -1.0
        agent.step({"w": np.full(200_000, by, np.float32)}, learning_rate=1.0)
    if stuck:
        time.sleep(10_000)
    agent.close(json.loads(json.dumps({"w": float(agent.pull("w")[0])})))
