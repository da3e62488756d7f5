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

TOPICS, EXECUTORS, SWEEPS = (
    int(os.environ.get(*each)) for each in (("TOPICS", "20"), ("EXECUTORS", "8"), ("SWEEPS", "30"))
)
ALPHA, BETA = 0.1, 0.01


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


@njit(nogil=True, cache=True, fastmath=True)
def sample(docs, words, z, rows, of_docs, sums, beta_sum, seed):
    """Draw the topic of each token anew; return the sum of the logarithms of their weights."""
    np.random.seed(seed)
    p, total = np.empty(sums.size, np.float32), 0.0
    inverse = (1.0 / (sums + beta_sum)).astype(np.float32)
    for n in range(z.size):
        doc, word, k = of_docs[docs[n]], rows[words[n]], z[n]
        doc[k], word[k], sums[k] = doc[k] - 1, word[k] - 1, sums[k] - 1
        inverse[k] = 1.0 / (sums[k] + beta_sum)
        s, k = np.float32(0.0), 0
        for i in range(p.size):
            p[i] = (doc[i] + np.float32(ALPHA)) * (word[i] + np.float32(BETA)) * inverse[i]
            s += p[i]
        left = np.random.random() * s
        while k < p.size - 1 and left >= p[k]:
            left, k = left - p[k], k + 1
        doc[k], word[k], sums[k] = doc[k] + 1, word[k] + 1, sums[k] + 1
        inverse[k] = 1.0 / (sums[k] + beta_sum)
        z[n] = k
        total += np.log(s)
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
            weights = sample(
                self.docs[at], self.words[at] - lo, self.z[at], rows, self.of_docs, sums[0],
                BETA * VOCABULARY, 1000 * turn + self.number,
            )  # fmt: skip
            ctx.update("words", rows - before, np.arange(lo, hi))
            ctx.update("topics", sums - total)
            lengths = self.of_docs.sum(1) - 1 + ALPHA * TOPICS
            return weights - np.log(lengths)[self.docs[at]].sum(), at.stop - at.start

        def save(self):
            return self.z

        def restore(self, state):
            self.z = state
            self.of_docs = np.zeros((self.docs.max() + 1, TOPICS), np.int32)
            np.add.at(self.of_docs, (self.docs, self.z), 1)

    def finish(self, tables, result):
        return {**result, "tokens": int(tables["words"].sum()), "least": int(tables["words"].min())}


if __name__ == "__main__":
    elastic.launch(Lda())
