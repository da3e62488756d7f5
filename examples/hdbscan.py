"""Clusters of any shape and density, by nearest neighbours that are found by and by: elastic.

    slackwater launch examples/hdbscan.py
    python examples/hdbscan.py      # alone

HDBSCAN needs each point's K nearest neighbours and a spanning tree of the distances to them. The
neighbours are found by NN-Descent: a neighbour's neighbour is likely to be one (Qiao 2021, section
4.7). Each executor keeps the lists of its part of the points. In an iteration it joins what is near
each of them, and offers pairs (x, y, d) to whoever keeps x: through the table `mail`, which has a
block for each sender and receiver. The table `lists` shows everybody all lists, whose entries are
negative while they are new, and beside each list its longest distance: an offer that would not be
taken is not sent. The tree of these edges, instead of all pairs, and the clusters in it are
scikit-learn's.

Settings by environment: POINTS, CLUSTERS, DIMENSIONS, METRIC (euclidean or cosine), CLUSTER_MAX
(the most points of a cluster, 0: any), PLAINLY (1: every offer is sent, whether it would be taken
or not), OUT (a file for points, labels and lists).
"""

import os

import numpy as np
from numba import njit

from slackwater import elastic
from slackwater.elastic import Table

POINTS, CLUSTERS, DIMENSIONS, CLUSTER_MAX, PLAINLY = (
    int(os.environ.get(name, default))
    for name, default in (
        ("POINTS", 5000), ("CLUSTERS", 50), ("DIMENSIONS", 3), ("CLUSTER_MAX", 0), ("PLAINLY", 0),
    )
)  # fmt: skip
METRIC = os.environ.get("METRIC", "euclidean")
EXECUTORS, NEIGHBOURS, ITERATIONS, SETTLED = 4, 15, 12, 0.001
CLUSTER_MIN = 5
TREES, LEAF = 4, 24
PER_ROW = 64
"""Offers in a row of the mail."""
BLOCK = -(-POINTS * NEIGHBOURS // (2 * EXECUTORS * EXECUTORS * PER_ROW))
"""Rows for what an executor offers to another one in an iteration; what is beyond is lost."""
STEPS = 2**23
"""Distances in the mail and beside the lists are whole numbers of so many steps of the longest."""


def points():
    """A fifth of them anywhere, the others at normal distances from the centres of clusters."""
    rng = np.random.default_rng(1)
    noise = POINTS // 5
    centres = rng.random((CLUSTERS, DIMENSIONS))
    own = rng.integers(0, CLUSTERS, POINTS - noise)
    spread = 0.1 * CLUSTERS ** (-1 / DIMENSIONS)
    near = centres[own] + rng.normal(0, spread, (len(own), DIMENSIONS))
    x = np.concatenate([near, rng.random((noise, DIMENSIONS))])[rng.permutation(POINTS)]
    if METRIC == "cosine":  # Among points of length 1 the order of distances is the same.
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x.astype(np.float32)


def leaves(x, seed):
    """Divide the points by random directions; return those of a leaf as a row, -1 behind them."""
    rng, order = np.random.default_rng(seed), np.arange(len(x))
    count = 1
    while len(x) > LEAF * count:
        along = x @ rng.normal(size=x.shape[1])
        part = np.arange(len(x)) * count // len(x)
        order = order[np.lexsort((along[order], part))]
        count *= 2
    cuts = np.arange(count + 1) * len(x) // count
    rows = np.full((count, np.diff(cuts).max()), -1)
    for row, first, end in zip(rows, cuts[:-1], cuts[1:], strict=True):
        row[: end - first] = order[first:end]
    return rows


@njit(cache=True)
def offer(near, far, new, at, y, d):
    """Put y into the list of the point at `at`, whose longest is replaced. 1: it was not there."""
    longest = 0
    for k in range(near.shape[1]):
        if near[at, k] == y:
            return 0
        if far[at, k] > far[at, longest]:
            longest = k
    if d >= far[at, longest]:
        return 0
    near[at, longest], far[at, longest], new[at, longest] = y, d, True
    return 1


@njit(cache=True)
def take(mail, step, first, near, far, new):
    """Take what others offered."""
    changes = 0
    for i in range(len(mail)):
        changes += offer(near, far, new, mail[i, 0] - 1 - first, mail[i, 1] - 1, mail[i, 2] * step)
    return changes


@njit(cache=True)
def distance(x, p, q):
    total = np.float32(0.0)
    for k in range(x.shape[1]):
        total += (x[p, k] - x[q, k]) ** 2
    return np.sqrt(total)


@njit(cache=True)
def join_leaves(x, rows, first, near, far, new):
    """Offer all points of a leaf to those of them that are kept here."""
    for row in rows:
        for p in row:
            if first <= p < first + len(near):
                for q in row:
                    if q >= 0 and q != p:
                        offer(near, far, new, p - first, q, distance(x, p, q))


@njit(cache=True)
def chosen(lists, first, count, cap, state):
    """Draw up to `cap` new and old neighbours of the points that are kept here, in both directions,
    numbered from 1 on; 0: none."""
    fresh, old = np.zeros((count, cap), np.int64), np.zeros((count, cap), np.int64)
    seen = np.zeros((2, count), np.int64)
    for r in range(len(lists)):
        for k in range(lists.shape[1]):
            entry = lists[r, k]
            if entry == 0:
                continue
            into, kind = (fresh, 0) if entry < 0 else (old, 1)
            for at, other in ((abs(entry) - 1, r + 1), (r, abs(entry))):
                at -= first
                if not 0 <= at < count:
                    continue
                place = seen[kind, at]
                seen[kind, at] += 1
                if place >= cap:
                    state = (state * 1103515245 + 12345) & 0x7FFFFFFF
                    place = state % (place + 1)
                if place < cap:
                    into[at, place] = other
    return fresh, old


@njit(cache=True)
def join(x, fresh, old, longest, plainly, first, near, far, new, owners, out, counts):
    """Join what is near each point that is kept here. Returns the lists' changes, the offers to
    others, and how many of these were not sent as they would not be taken."""
    changes, offers, spared, count = 0, 0, 0, len(near)
    for i in range(count):
        for a in range(fresh.shape[1]):
            p = fresh[i, a] - 1
            for b in range(2 * fresh.shape[1]):
                of_old = b >= fresh.shape[1]
                q = (old[i, b - fresh.shape[1]] if of_old else fresh[i, b]) - 1
                if p < 0 or q < 0 or p == q or (not of_old and b <= a):
                    continue
                d = distance(x, p, q)
                for to, other in ((p, q), (q, p)):
                    if first <= to < first + count:
                        changes += offer(near, far, new, to - first, other, d)
                        continue
                    offers += 1
                    if d >= longest[to]:
                        spared += 1
                        if not plainly:
                            continue
                    block = owners[to]
                    if counts[block] < out.shape[1]:
                        out[block, counts[block], 0] = to + 1
                        out[block, counts[block], 1] = other + 1
                        out[block, counts[block], 2] = d
                        counts[block] += 1
    return changes, offers, spared


class UntilSettled(elastic.Driver):
    """Ends once an iteration changes less than a thousandth of all lists' entries."""

    def start(self, run):
        self.left, self.changed = run.executors, 0.0
        for executor in range(run.executors):
            run.dispatch(executor, 0)

    def done(self, run, executor, task, result):
        self.left, self.changed = self.left - 1, self.changed + result / (POINTS * NEIGHBOURS)
        if self.left:
            return
        run.report(task + 1, ITERATIONS, changed=self.changed)
        if task + 1 == ITERATIONS or self.changed < SETTLED:
            run.end({"iterations": task + 1})
            return
        self.left, self.changed = run.executors, 0.0
        for each in range(run.executors):
            run.dispatch(each, task + 1)

    def save(self):
        return self.left, self.changed

    def restore(self, state):
        self.left, self.changed = state


class Hdbscan(elastic.App):
    executors = EXECUTORS
    tables = {
        "lists": Table(POINTS, NEIGHBOURS + 1, dtype="int32", sparse=True),
        "mail": Table(EXECUTORS**2 * BLOCK, 3 * PER_ROW, dtype="int32", sparse=True),
        "offers": Table(1, 3, dtype="int32"),  # In thousands: all, spared, and bytes of mail.
    }
    driver = UntilSettled()

    class Executor(elastic.Executor):
        def load(self, part):
            self.x = points()
            self.step = float(np.linalg.norm(np.ptp(self.x, axis=0)) * 1.01) / STEPS
            owners = np.arange(POINTS) * EXECUTORS // POINTS
            self.owners, mine = owners, np.flatnonzero(owners == part)
            self.first, shape = int(mine[0]), (len(mine), NEIGHBOURS)
            self.near, self.far = np.full(shape, -1), np.full(shape, np.inf, np.float32)
            self.new = np.zeros(shape, bool)
            self.shown = np.zeros((len(mine), NEIGHBOURS + 1), np.int64)
            self.sent = np.zeros((EXECUTORS, BLOCK, 3 * PER_ROW), np.int64)

        def run(self, ctx, task):
            if task == 0:
                for seed in range(TREES):
                    rows = leaves(self.x, seed)
                    join_leaves(self.x, rows, self.first, self.near, self.far, self.new)
                self.show(ctx)
                return self.near.size
            changes = self.open_mail(ctx)
            lists = ctx.get("lists").astype(np.int64)
            longest = lists[:, -1] * self.step
            fresh, old = chosen(
                lists[:, :-1], self.first, len(self.near), NEIGHBOURS, 1000 * task + self.number
            )
            self.new &= ~(fresh[:, :, None] == self.near[:, None, :] + 1).any(1)  # Drawn once.
            out = np.zeros((EXECUTORS, BLOCK * PER_ROW, 3))
            found, offers, spared = join(
                self.x, fresh, old, longest, bool(PLAINLY), self.first, self.near, self.far,
                self.new, self.owners, out, np.zeros(EXECUTORS, np.int64),
            )  # fmt: skip
            self.show(ctx)
            sent = self.send(ctx, out)
            counts = np.array([[offers, spared, sent]]) / 1000
            ctx.update("offers", np.rint(counts).astype(np.int64))
            return changes + found

        def open_mail(self, ctx):
            """Take what others offered in the iteration before."""
            blocks = [np.arange(BLOCK) + (i * EXECUTORS + self.number) * BLOCK
                      for i in range(EXECUTORS) if i != self.number]  # fmt: skip
            mail = ctx.get("mail", rows=np.concatenate(blocks)).reshape(-1, 3)
            mail = mail[mail[:, 0] > 0].astype(np.int64)
            return take(mail, self.step, self.first, self.near, self.far, self.new)

        def show(self, ctx):
            """Let everybody see the lists: the rows that have changed."""
            entries = (self.near + 1) * np.where(self.new, -1, 1)
            far = np.ceil(self.far.max(1, keepdims=True) / self.step).clip(max=STEPS)
            shown = np.concatenate([entries, far.astype(np.int64)], 1)
            rows = np.flatnonzero((shown != self.shown).any(1))
            ctx.update("lists", shown[rows] - self.shown[rows], rows=rows + self.first)
            self.shown = shown

        def send(self, ctx, out):
            """Put offers where those of the iteration before were. Returns bytes."""
            out[:, :, 2] = np.rint(out[:, :, 2] / self.step)
            mail = out.astype(np.int64).reshape(self.sent.shape)
            to, rows = np.nonzero((mail != self.sent).any(2))
            ctx.update(
                "mail", mail[to, rows] - self.sent[to, rows],
                rows=(self.number * EXECUTORS + to) * BLOCK + rows,
            )  # fmt: skip
            self.sent = mail
            return 12 * int((mail.reshape(-1, 3)[:, 0] > 0).sum())

        def save(self):
            return self.near, self.far, self.new, self.shown, self.sent

        def restore(self, state):
            self.near, self.far, self.new, self.shown, self.sent = state

    def finish(self, tables, result):
        near = np.abs(tables["lists"][:, :-1]).astype(np.int64) - 1
        x, (offers, spared, sent) = points(), tables["offers"][0].tolist()
        labels, spared = clustered(x, near), spared / max(1, offers)
        if out := os.environ.get("OUT"):
            np.savez(out, x=x, labels=labels, near=near, spared=spared)
        return {
            **result, "clusters": int(labels.max()) + 1, "noise": float((labels < 0).mean()),
            "spared": spared, "mail_bytes": 1000 * sent,
        }  # fmt: skip


def clustered(x, near):
    """Return the label of each point, -1: noise, by the tree of the lists' edges."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import connected_components
    from sklearn.cluster import HDBSCAN

    p, q = np.repeat(np.arange(len(x)), near.shape[1]), near.ravel()
    p, q = p[q >= 0], q[q >= 0]
    apart = x[p].astype(np.float64) - x[q]
    d = (apart**2).sum(1) / 2 if METRIC == "cosine" else np.sqrt((apart**2).sum(1))
    d = np.maximum(d, 1e-9)  # 0 would be no edge.
    graph = csr_matrix((d, (p, q)), (len(x), len(x)))
    graph = graph.maximum(graph.T)
    count, of = connected_components(graph)
    if count > 1:  # Join the rest from far away.
        ends = np.unique(of, return_index=True)[1]
        a, b, far = ends[:-1], ends[1:], np.full(count - 1, 10 * d.max())
        graph = graph + csr_matrix((np.r_[far, far], (np.r_[a, b], np.r_[b, a])), graph.shape)
    model = HDBSCAN(  # A point counts among its own neighbours, but has no edge to itself.
        min_cluster_size=CLUSTER_MIN, min_samples=CLUSTER_MIN - 1, metric="precomputed",
        max_cluster_size=CLUSTER_MAX or None, copy=True,
    )  # fmt: skip
    return model.fit(graph).labels_


if __name__ == "__main__":
    elastic.launch(Hdbscan())
