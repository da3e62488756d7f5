"""Latent Dirichlet allocation by Gibbs sampling, words in rotation: an elastic program.

    DATA=reuters.ldac slackwater launch examples/lda.py --env DATA
    python examples/lda.py      # alone, on documents that it draws

Words are in as many blocks as there are executors, documents are divided among them. In each turn
every executor has one block to itself, so that counts of words are exact; those of topics are of
the turn before (STRADS; Qiao 2021, section 4.7). A token's topic is its executor's state.
"""

import os

import numpy as np
from numba import njit

from slackwater import elastic
from slackwater.elastic import Rotation, Table

TOPICS, SWEEPS = (int(os.environ.get(*each)) for each in (("TOPICS", "20"), ("SWEEPS", "30")))
EXECUTORS, ALPHA, BETA = 8, 0.1, 0.01


def corpus():
    """Read (documents, words) of every token from a file in LDA-C's format, or draw them."""
    if "DATA" not in os.environ:
        rng = np.random.default_rng(0)
        topics = rng.dirichlet(np.full(1000, 0.05), TOPICS)
        docs = np.repeat(np.arange(300), 100)
        shares = rng.dirichlet(np.full(TOPICS, 0.1), 300).cumsum(1)
        z = (shares[docs, :-1] < rng.random((30_000, 1))).sum(1)
        return docs, (topics.cumsum(1)[z, :-1] < rng.random((30_000, 1))).sum(1)
    with open(os.environ["DATA"]) as file:
        lines = [[pair.split(":") for pair in line.split()[1:]] for line in file]
    found = [(d, int(w), int(n)) for d, line in enumerate(lines) for w, n in line]
    docs, words, counts = np.array(found).T
    return np.repeat(docs, counts), np.repeat(words, counts)


DOCS, WORDS = corpus()
VOCABULARY = int(WORDS.max()) + 1
BOUNDS = [VOCABULARY * i // EXECUTORS for i in range(EXECUTORS + 1)]


@njit(nogil=True, cache=True)
def sample(docs, words, z, rows, of_docs, sums, beta_sum, seed):
    """Draw the topic of each token anew; return the sum of the tokens' log likelihoods."""
    np.random.seed(seed)
    p, total = np.empty(sums.size), 0.0
    for n in range(z.size):
        d, w, old = docs[n], words[n], z[n]
        of_docs[d, old] -= 1
        rows[w, old] -= 1
        sums[old] -= 1
        s = 0.0
        for k in range(sums.size):
            s += (of_docs[d, k] + ALPHA) * (rows[w, k] + BETA) / (sums[k] + beta_sum)
            p[k] = s
        new = min(np.searchsorted(p, np.random.random() * s, side="right"), sums.size - 1)
        of_docs[d, new] += 1
        rows[w, new] += 1
        sums[new] += 1
        z[n] = new
        total += np.log(s / (of_docs[d].sum() - 1 + ALPHA * sums.size))
    return total


class Lda(elastic.App):
    executors = EXECUTORS
    tables = {
        "words": Table(VOCABULARY, TOPICS, dtype="int32", sparse=True),
        "topics": Table(1, TOPICS, dtype="int32"),
    }
    driver = Rotation(SWEEPS, "likelihood")

    class Executor(elastic.Executor):
        def load(self, part):
            order = np.flatnonzero(part == DOCS % EXECUTORS)
            order = order[np.argsort(WORDS[order], kind="stable")]
            self.docs, self.words = DOCS[order] // EXECUTORS, WORDS[order]
            self.restore(np.random.default_rng(part).integers(0, TOPICS, len(order)))

        def run(self, ctx, turn):
            if turn < 0:
                counts = np.zeros((VOCABULARY, TOPICS))
                np.add.at(counts, (self.words, self.z), 1)
                ctx.update("words", counts)
                ctx.update("topics", counts.sum(0)[None])
                return
            block = (self.number + turn) % EXECUTORS
            lo, hi = BOUNDS[block : block + 2]
            at = slice(*np.searchsorted(self.words, (lo, hi)))
            rows, sums = ctx.get("words", np.arange(lo, hi)), ctx.get("topics")
            before, total = rows.copy(), sums.copy()
            likelihood = sample(
                self.docs[at], self.words[at] - lo, self.z[at], rows, self.of_docs, sums[0],
                BETA * VOCABULARY, 1000 * turn + self.number,
            )  # fmt: skip
            ctx.update("words", rows - before, np.arange(lo, hi))
            ctx.update("topics", sums - total)
            return likelihood, at.stop - at.start

        def save(self):
            return self.z

        def restore(self, state):
            self.z = state
            self.of_docs = np.zeros((self.docs.max() + 1, TOPICS), np.int64)
            np.add.at(self.of_docs, (self.docs, self.z), 1)

    def finish(self, tables, result):
        return {**result, "tokens": int(tables["words"].sum()), "least": int(tables["words"].min())}


if __name__ == "__main__":
    elastic.launch(Lda())
