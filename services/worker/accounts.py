"""Run each job under an account of its own, so that the kernel keeps jobs apart.

The first process of a rank stays with the service's account, which believes the files that it
writes. The program alone becomes the job's account, for good: no groups, no new privileges. Ranks
of one job on one node share an account; no two jobs have the same at a time.
"""

import os
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from slackwater.common.base.accounts import account_ids
from slackwater.common.base.errors import ConfigRejected
from slackwater.services.worker.processes import RankFiles

NONE = 0
"""The service's own account: what it runs as, whatever its number is."""


class Accounts:
    """`text`: the range of user ids; empty: jobs run under the service's account."""

    def __init__(self, text: str) -> None:
        self._ids = account_ids(text)
        self._of: dict[str, tuple[int, set[int]]] = {}
        """Account and ranks of each job that runs."""

    def check(self, state_dir: Path) -> None:
        """Raises ConfigRejected where this service cannot give accounts to jobs."""
        if not self._ids:
            return
        if os.geteuid() != 0:
            raise ConfigRejected("accounts: only root may give them: leave it empty")
        if shutil.which("setpriv") is None:
            raise ConfigRejected("accounts: there is no setpriv: install util-linux")
        for folder in (state_dir, *state_dir.parents):
            if not folder.stat().st_mode & 0o001:
                raise ConfigRejected(
                    f"accounts: jobs' accounts cannot pass through {folder} to their files below "
                    f"state_dir: `chmod o+x {folder}`, or choose another state_dir"
                )

    def take(self, job: str, rank: int) -> int:
        """Return the account of a rank that is about to start. Raises OSError: none is free."""
        if not self._ids:
            return NONE
        if job not in self._of:
            taken = {id for id, _ in self._of.values()}
            first = int.from_bytes(sha256(job.encode()).digest()[:8], "big")
            order = (self._ids[(first + step) % len(self._ids)] for step in range(len(self._ids)))
            found = next((id for id in order if id not in taken), None)
            if found is None:
                raise OSError(f"all {len(self._ids)} accounts are in use: give a wider range")
            self._of[job] = found, set()
        self._of[job][1].add(rank)
        return self._of[job][0]

    def keep(self, job: str, rank: int, account: int) -> None:
        """Know of a rank that a former life of the service started."""
        if account != NONE:
            self._of.setdefault(job, (account, set()))[1].add(rank)

    def free(self, job: str, rank: int) -> None:
        """A rank has ended, and nothing of it is left."""
        if job in self._of:
            self._of[job][1].discard(rank)
            if not self._of[job][1]:
                del self._of[job]


def make_room(files: RankFiles, account: int) -> None:
    """Make the folder that is the account's own, for its result and as its home. Raises OSError."""
    if account == NONE:
        return
    for folder in (files.folder.parent, files.folder):
        folder.chmod(0o711)  # To pass through, not to look into.
    own = files.path("own")
    own.mkdir(mode=0o700, exist_ok=True)
    os.chown(own, account, account)
    stacks = files.path("stacks")  # In a folder of ours: it cannot become a link.
    os.close(os.open(stacks, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    os.chown(stacks, account, account)


def give(copy: Path, account: int) -> None:
    """Make the job's copy of its code the account's own. A rank of the job that runs may change
    the folder meanwhile: no link is followed, and no path is looked up twice. Raises OSError."""
    if account in (NONE, copy.stat().st_uid):
        return
    for _, folders, names, descriptor in os.fwalk(copy):
        os.fchown(descriptor, account, account)
        for name in (*folders, *names):
            os.chown(name, account, account, dir_fd=descriptor, follow_symlinks=False)


def at_home(
    environment: Mapping[str, str], asked: Mapping[str, str], own: Path, account: int
) -> dict[str, str]:
    """Return a rank's environment with the account's own name and home, unless the job `asked` for
    others."""
    if account == NONE:
        return dict(environment)
    home, name = str(own.absolute()), f"job-{account}"
    its = {"HOME": home, "XDG_CACHE_HOME": f"{home}/.cache", "USER": name, "LOGNAME": name}
    return {**environment, **its, **{each: asked[each] for each in its if each in asked}}
