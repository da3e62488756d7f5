"""Trains by an Agent, and computes for a while in each iteration; `STUCK`: or stays so for ever."""

import json
import os
import time

import numpy as np

from slackwater import Agent

iterations, stuck = int(os.environ["ITERATIONS"]), os.environ.get("STUCK") == "1"
with Agent(tensors={"w": np.zeros(200_000, np.float32)}) as agent:
    while agent.iteration < iterations:
        until_s = time.perf_counter() + 0.01
        while time.perf_counter() < until_s:
            pass
        agent.step({"w": np.full(200_000, -1.0, np.float32)}, learning_rate=1.0)
    if stuck:
        time.sleep(10_000)
    agent.close(json.loads(json.dumps({"w": float(agent.pull("w")[0])})))
