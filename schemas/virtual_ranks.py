"""The virtual ranks of a job: more of them than it may ever have workers, and all in one update."""


def check_virtual_ranks(virtual_ranks: int, workers_max: int, consistency: str) -> None:
    """Raise ValueError where a job of at most so many workers cannot have the virtual ranks."""
    if consistency != "synchronous":
        raise ValueError(
            f"virtual_ranks: {virtual_ranks}, but the job is {consistency}; only a synchronous job "
            "has virtual ranks: leave them out"
        )
    if virtual_ranks < workers_max:
        raise ValueError(
            f"virtual_ranks: {virtual_ranks}, fewer than the {workers_max} workers that the job "
            f"can have; give at least {workers_max}, or fewer workers"
        )
