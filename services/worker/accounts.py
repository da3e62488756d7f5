"""Run each job under an account of its own, so that the kernel keeps jobs apart.

The first process of a rank stays with the service's account, which believes the files that it
writes. The program alone becomes the job's account, for good: no groups, no new privileges. Ranks
of one job on one node share an account; no two jobs have the same at a time.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

from slackwater.common.base.accounts import account_ids, check_passable
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.base.private_files import private_folder
from slackwater.services.worker.events import Found
from slackwater.services.worker.processes import RankFiles

_PASS: Final = 0o711
"""Mode of a folder to pass through, not to look into."""
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
        check_passable("accounts", state_dir)

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

    def adopt(self, state_dir: Path, alive: Sequence[Found]) -> None:
        """Know of the ranks that a former life of the service started, all of them before one is
        given the account of another; and let no account see which jobs there are, the code that is
        kept for them, or what is left of others. Raises OSError."""
        for each in alive:
            account = RankFiles(state_dir, each.job, each.rank, each.attempt).intent().account
            if account != NONE:
                self._of.setdefault(each.job, (account, set()))[1].add(each.rank)
        if not self._ids:
            return
        jobs = state_dir / "jobs"
        jobs.chmod(_PASS)
        private_folder(state_dir / "packs")
        for folder in jobs.glob("*/"):
            if folder.name not in self._of:
                private_folder(folder)

    def free(self, files: RankFiles) -> None:
        """A rank has ended, and nothing of it is left. Close its job's files after the last one:
        another job may get its account. Raises OSError."""
        if files.job in self._of:
            self._of[files.job][1].discard(files.rank)
            if not self._of[files.job][1]:
                del self._of[files.job]
                private_folder(files.folder)


def make_room(files: RankFiles, account: int) -> None:
    """Make the folder that is the account's own, for its result and as its home. Raises OSError."""
    if account == NONE:
        return
    own = files.path("own")
    own.mkdir(mode=0o700, exist_ok=True)
    os.chown(own, account, account)
    stacks = files.path("stacks")  # In a folder of ours: it cannot become a link.
    os.close(os.open(stacks, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    os.chown(stacks, account, account)
    files.folder.chmod(_PASS)


def give(copy: Path, account: int) -> None:
    """Make the job's copy of its code the account's own, and nobody else's. A process of the job
    may change the folder meanwhile: what did not belong to the copy's owner, such as another file
    that a link was made to, is left alone. Raises OSError."""
    former = copy.stat().st_uid
    if account in (NONE, former):
        return
    # From below: the copy itself last, by which it counts as given.
    for _, folders, names, descriptor in os.fwalk(copy, topdown=False):
        for name in (*folders, *names):
            _give(name, descriptor, former, account)
        if os.fstat(descriptor).st_uid == former:
            os.fchown(descriptor, account, account)


def _give(name: str, folder: int, former: int, account: int) -> None:
    """Give a file or a link in the open `folder`. It stays the same one while it is looked at."""
    try:
        opened = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return
    try:
        if os.fstat(opened).st_uid == former:
            os.chown(f"/proc/self/fd/{opened}", account, account)
    finally:
        os.close(opened)


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
