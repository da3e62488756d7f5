"""Truths of a controller's state after every step; tests and the simulation look at them."""

from slackwater.services.controller.index import Index, Whereabouts
from slackwater.services.controller.state import State


def check_invariants(state: State) -> None:
    """Raises AssertionError when an index is not what all records together say, or a record's
    fields do not fit its phase."""
    anew = Index()
    for id, job in state.jobs.items():
        name = state.policy_name(job)
        where = Whereabouts.of(job.record)
        anew.follow(where, name, shares=not state.policy_named(name).private)
        record = job.record
        good = {
            "known by its id": id == job.id,
            "with a target only while it moves": not record.target
            or record.phase in ("moving", "released"),
            "with a target as long as it moves": record.phase != "moving"
            or len(record.target) == len(record.places),
            "nowhere while it waits": record.phase != "waiting" or not record.places,
            "somewhere once it is hosted": record.phase in ("waiting", "released")
            or len(record.places) == len(record.buckets) > 0,
            "with nothing to decide while it moves or once it is released": job.pending is None
            or record.phase not in ("moving", "released"),
            "copied where it moves alone": job.moving or not job.copied,
        }
        broken = [what for what, holds in good.items() if not holds]
        assert not broken, f"job {id} is {record.phase}: {broken}; before: {job.story}"
    here, there = state.index.everything(), anew.everything()
    wrong = {name: (here[name], there[name]) for name in here if here[name] != there[name]}
    assert not wrong, f"by name, (the index, what the records say): {wrong}"
    for entry in state.aggregators.values():
        heard = entry.heartbeat is not None
        assert entry.alive == (entry.presence == "alive"), f"{entry.id}: {entry.story}"
        assert heard or not entry.alive, f"{entry.id} is alive and was not heard: {entry.story}"
