"""A program that needs more memory than it may have: python walker_program.py PAGES.

Every page of it holds its number, the generation of its last write and a checksum. It is told, line
by line, what to do, and answers each line with one of JSON:

    join GROUP                        become a member of this cgroup
    walk ORDER SEED EVERY             check all pages, in that order; every EVERYth is written anew

Nothing that it was given to count lies in the pages that travel: the group limits only what was
allocated after it had joined.
"""

import json
import mmap
import random
import resource
import sys
from pathlib import Path

from slackwater.loadgen.memory.checker import PAGE_BYTES, content

STRIDE = 7


class Walker:
    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.generations = [0] * pages
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory = mmap.mmap(-1, pages * PAGE_BYTES, flags=private)
        self.memory.madvise(mmap.MADV_NOHUGEPAGE)

    def order(self, name: str, seed: int) -> list[int]:
        every = list(range(self.pages))
        if name == "backwards":
            return every[::-1]
        if name == "strided":
            return [page for first in range(STRIDE) for page in every[first::STRIDE]]
        if name == "random":
            random.Random(seed).shuffle(every)
        return every

    def walk(self, name: str, seed: int, every: int) -> dict[str, object]:
        wrong: list[int] = []
        for number, page in enumerate(self.order(name, seed)):
            at = slice(page * PAGE_BYTES, (page + 1) * PAGE_BYTES)
            if self.memory[at] != content(page, self.generations[page]):
                wrong.append(page)
            if every and number % every == 0:
                self.generations[page] += 1
                self.memory[at] = content(page, self.generations[page])
        return {"pages": self.pages, "wrong": wrong[:8], **figures()}


def figures() -> dict[str, object]:
    status = Path("/proc/self/status").read_text().splitlines()
    [swapped] = [line for line in status if line.startswith("VmSwap")]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return {"swapped_kib": int(swapped.split()[1]), "major_faults": faults}


def main(pages: int) -> None:
    walker = Walker(pages)
    for line in sys.stdin:
        command, *words = line.split()
        if command == "join":
            (Path(words[0]) / "cgroup.procs").write_text("0")
            answer: dict[str, object] = figures()
        else:
            name, seed, every = words
            answer = walker.walk(name, int(seed), int(every))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
