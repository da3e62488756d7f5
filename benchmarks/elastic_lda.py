"""Latent Dirichlet allocation as an elastic program, beside the package `lda`, on Reuters.

    python benchmarks/elastic_lda.py [--topics 20 100] [--rounds 3]

Both sample every token's topic anew in each sweep, on one core: `examples/lda.py` alone in its
process, driver, host, tables and two executors included, and `lda` (C, by pip install lda). A
sweep's time is the difference of a long run and a short one, so that neither's start counts. The
likelihood is of all tokens, by the topics' words that each ends with and by shares of topics that
are fitted to them in the same way (goal: 4 times the speed, at a likelihood within half a percent).
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from figures import Figure, Row, Skipped, show, this_command, write_json
from numpy.typing import NDArray

EXAMPLES: Final = Path(__file__).resolve().parents[1] / "examples"
PROGRAM: Final = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[1])
import lda
from slackwater import elastic

class Lda(lda.Lda):
    def finish(self, tables, result):
        np.save(sys.argv[2], tables["words"].T)
        return result

elastic.launch(Lda())
"""
PEER: Final = """
import logging, sys
import numpy as np
import lda
logging.getLogger("lda").setLevel(logging.ERROR)
counts, topics, sweeps = np.load(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4])
model = lda.LDA(topics, n_iter=sweeps, alpha=0.1, eta=0.01, random_state=1, refresh=10**9)
np.save(sys.argv[2], model.fit(counts).nzw_)
"""
SHORT, LONG = 20, 120
FITTING: Final = 30
"""Steps in which shares of topics are fitted."""
ONE_CORE: Final = {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "NUMBA")}
Counts = NDArray[np.int64]


def read(path: Path) -> Counts:
    """Return the counts of a file in LDA-C's format, [documents, words]."""
    lines = [line.split()[1:] for line in path.read_text().splitlines()]
    found = [(d, *map(int, pair.split(":"))) for d, line in enumerate(lines) for pair in line]
    docs, words, times = np.array(found).T
    counts = np.zeros((docs.max() + 1, words.max() + 1), np.int64)
    counts[docs, words] = times
    return counts


def likelihood(counts: Counts, of_words: Counts) -> float:
    """Return the mean log likelihood of a token, by counts of words in topics, [topics, words]."""
    words = (of_words + 0.01) / (of_words + 0.01).sum(1, keepdims=True)
    shares = np.full((len(counts), len(words)), 1.0 / len(words))
    for _ in range(FITTING):
        shares *= (counts / (shares @ words)) @ words.T + 0.1 / shares
        shares /= shares.sum(1, keepdims=True)
    return float((counts * np.log(shares @ words)).sum() / counts.sum())


def run(folder: Path, *words: object, **environment: str) -> tuple[float, Counts]:
    """Run a program; return how long it took, and the counts that it saved."""
    saved = folder / "words.npy"
    begun_s = time.perf_counter()
    subprocess.run(
        ["taskset", "-c", "0", sys.executable, *map(str, words)],
        check=True, capture_output=True, timeout=600.0,
        env={**os.environ, **ONE_CORE, **environment},
    )  # fmt: skip
    took_s = time.perf_counter() - begun_s
    found: Counts = np.load(saved)
    return took_s, found


def compare(folder: Path, data: Path, topics: int, rounds: int) -> list[Row]:
    counts = read(data)
    np.save(folder / "counts.npy", counts)
    (folder / "ours.py").write_text(PROGRAM)
    (folder / "theirs.py").write_text(PEER)
    saved = folder / "words.npy"
    sweep_s: dict[str, list[float]] = {"ours": [], "theirs": []}
    reached: dict[str, float] = {}
    for _ in range(rounds):
        for who, each_s in sweep_s.items():
            took: dict[int, float] = {}
            for sweeps in (SHORT, LONG):
                if who == "ours":
                    took[sweeps], words = run(
                        folder, folder / "ours.py", EXAMPLES, saved,
                        DATA=str(data), TOPICS=str(topics), SWEEPS=str(sweeps), EXECUTORS="2",
                    )  # fmt: skip
                else:
                    took[sweeps], words = run(
                        folder, folder / "theirs.py", folder / "counts.npy", saved, topics, sweeps
                    )
            each_s.append((took[LONG] - took[SHORT]) / (LONG - SHORT))
            reached[who] = likelihood(counts, words)
    rates = {who: [counts.sum() / s / 1e6 for s in each_s] for who, each_s in sweep_s.items()}
    ratios = tuple(a / b for a, b in zip(rates["ours"], rates["theirs"], strict=True))
    return [
        Figure(
            f"{topics} topics: tokens sampled in a second, one core",
            statistics.median(rates["ours"]), statistics.median(rates["theirs"]), "M/s",
            "lda", 4.0, ratios=ratios,
        ),
        Figure(
            f"{topics} topics: log likelihood of a token after {LONG} sweeps",
            reached["ours"], reached["theirs"], "", "lda", 1.005, lower_is_better=True,
        ),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topics", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data/reuters-lda/reuters.ldac")
    )
    parser.add_argument("--json", type=Path)
    options: Any = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        has = subprocess.run([sys.executable, "-c", "import lda"], cwd=folder, capture_output=True)
        if has.returncode or not options.data.is_file():
            why = "pip install lda" if has.returncode else f"{options.data} is absent"
            rows = [Skipped("LDA", why)]
        else:
            for topics in options.topics:
                rows += compare(Path(folder), options.data, topics, options.rounds)
    show("latent Dirichlet allocation", rows)
    if options.json is not None:
        write_json(options.json, this_command(), rows)


if __name__ == "__main__":
    main()
