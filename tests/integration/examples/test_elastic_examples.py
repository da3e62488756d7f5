"""The elastic examples are tests: each is run alone and by `slackwater launch`, beside a peer on
the same data. Each starts Python a few times, which takes seconds."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.conftest import public_traces

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        yield Path(folder)


@pytest.fixture
def reuters() -> str:
    path = public_traces().parent / "data" / "reuters-lda" / "reuters.ldac"
    if not path.is_file():
        pytest.skip(f"the Reuters counts are absent ({path})")
    return str(path)


def result_of(output: str) -> dict[str, Any]:
    lines = [line.partition("result: ")[2] for line in output.splitlines() if "result: " in line]
    assert len(lines) == 1, output[-3000:]
    found: dict[str, Any] = json.loads(lines[0])
    return found


def alone(name: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True, text=True, timeout=120, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return result_of(done.stdout)


class Launched:
    """`slackwater launch`, on a cluster of its own."""

    def __init__(self, folder: Path, name: str, *options: str, **environment: str) -> None:
        own = {"XDG_STATE_HOME": str(folder / "home"), "TMPDIR": str(folder), **environment}
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLACKWATER_", "NATS_"))
        }
        self.path = str(EXAMPLES / name)
        given = [word for variable in environment for word in ("--env", variable)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slackwater.cli.main", "launch", self.path, *options, *given],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
            env={**inherited, **own},
        )  # fmt: skip

    def output(self) -> str:
        output, _ = self.process.communicate(timeout=200)
        assert self.process.returncode == 0, output[-4000:]
        return output

    def hosts(self) -> list[psutil.Process]:
        """The processes of its job that run, in the order of their start."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if self.path in child.cmdline()[:3]:
                    found.append(child)
            except psutil.Error:  # It has ended.
                continue
        return found


def test_mlr_is_as_right_as_scikit_learn(short: Path) -> None:
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss

    x, y = load_digits(return_X_y=True)
    peer = LogisticRegression(C=10.0, max_iter=300).fit(x / 16, y)
    lowest = log_loss(y, peer.predict_proba(x / 16))
    mine = alone("mlr.py", ITERATIONS="600")
    assert mine["iterations"] == 600
    assert lowest < mine["loss"] < 0.17, "600 full gradients; the peer's method is of second order"
    there = Launched(short, "mlr.py", "--hosts", "2:4", ITERATIONS="600").output()
    assert result_of(there)["loss"] == pytest.approx(mine["loss"], rel=0.005)
    assert "16 executors on 2 hosts" in there
    left = [path.name for path in short.glob("checkpoints/*/elastic/*")]
    assert left == ["journal.jsonl"], "what its hosts kept against kills is of no use any more"


def test_kmeans_is_as_right_as_scikit_learn(short: Path) -> None:
    from sklearn.cluster import KMeans
    from sklearn.datasets import load_digits

    x = load_digits().data / 16
    peer = KMeans(10, n_init=10, random_state=0).fit(x).inertia_
    there = result_of(Launched(short, "kmeans.py").output())
    for found in (alone("kmeans.py"), there):
        assert found["inertia"] < 1.03 * peer


def test_the_lasso_finds_what_scikit_learn_finds(short: Path) -> None:
    """Within what steps of several updates each are off: in proportion to the rate."""
    from sklearn.datasets import load_diabetes
    from sklearn.linear_model import Lasso

    x, y = load_diabetes(return_X_y=True)
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    peer = Lasso(0.1, fit_intercept=False).fit(x, y).coef_

    def objective(w: np.ndarray) -> float:
        return float(((y - x @ w) ** 2).mean() / 2 + 0.1 * np.abs(w).sum())

    launched, killed = Launched(short, "lasso.py", "--hosts", "2"), False
    while not killed and launched.process.poll() is None:
        time.sleep(0.2)
        if len(hosts := launched.hosts()) == 2:
            hosts[1].send_signal(signal.SIGKILL)
            killed = True
    there = result_of(launched.output())
    assert killed
    for found in (alone("lasso.py"), there):
        w = np.array(found["w"])
        assert objective(peer) * 0.9999 < objective(w) < objective(peer) * 1.005
        assert (np.abs(w[peer == 0]) < 0.01).all()
    assert (np.array(alone("lasso.py")["w"]) == 0).sum() == (peer == 0).sum(), "exactly zero"


def test_factorization_finds_all_but_the_noise(short: Path) -> None:
    there = result_of(Launched(short, "mf.py").output())
    for found in (alone("mf.py"), there):
        assert 0.08 < found["loss"] < 0.11, "the ratings have noise of 0.1"


def test_nmf_finds_all_but_the_noise_and_nothing_below_0(short: Path) -> None:
    """The error is of entries that it was not shown. scikit-learn's takes those for zeros: five
    times the error and more."""
    from sklearn.decomposition import NMF

    sys.path.insert(0, str(EXAMPLES))
    try:
        import nmf
    finally:
        sys.path.remove(str(EXAMPLES))
    rows, columns, values = nmf.entries()
    known = np.arange(len(values)) < len(values) * 9 // 10
    matrix = np.zeros((nmf.ROWS, nmf.COLUMNS))
    matrix[rows[known], columns[known]] = np.maximum(0.0, values[known])
    left = (peer := NMF(nmf.RANK, max_iter=400, random_state=0)).fit_transform(matrix)
    foretold = (left @ peer.components_)[rows[~known], columns[~known]]
    peers_error = float(np.sqrt(((values[~known] - foretold) ** 2).mean()))
    there = result_of(Launched(short, "nmf.py", "--hosts", "2").output())
    for found in (alone("nmf.py"), there):
        assert 0.045 < found["loss"] < 0.075, "the entries have noise of 0.05"
        assert 0.0 <= found["least"] < 0.01
        assert found["loss"] * 5 < peers_error


def test_lda_counts_every_token_once_where_hosts_are_killed(short: Path, reuters: str) -> None:
    mine = alone("lda.py", DATA=reuters, SWEEPS="90")
    assert (mine["tokens"], mine["least"]) == (84_010, 0)
    launched, killed = Launched(short, "lda.py", DATA=reuters, SWEEPS="90"), 0
    until_s = time.monotonic() + 120
    while killed < 3 and launched.process.poll() is None and time.monotonic() < until_s:
        time.sleep(1.0)
        if hosts := launched.hosts():
            hosts[killed % len(hosts)].send_signal(signal.SIGKILL)
            killed += 1
    found = result_of(launched.output())
    assert killed == 3
    assert (found["tokens"], found["least"]) == (84_010, 0)
    assert found["likelihood"] == pytest.approx(mine["likelihood"], abs=0.1)


def test_a_peers_likelihood() -> None:
    """Documents that are drawn from a model are explained better than by scikit-learn's variational
    inference, and not better than by the model."""
    from sklearn.decomposition import LatentDirichletAllocation

    found = alone("lda.py")
    rng = np.random.default_rng(0)
    topics = rng.dirichlet(np.full(1000, 0.05), 20)
    docs = np.repeat(np.arange(300), 100)
    shares = rng.dirichlet(np.full(20, 0.1), 300)
    z = (shares.cumsum(1)[docs, :-1] < rng.random((30_000, 1))).sum(1)
    words = (topics.cumsum(1)[z, :-1] < rng.random((30_000, 1))).sum(1)
    truth = np.log((shares[docs] * topics[:, words].T).sum(1)).mean()
    counts = np.zeros((300, words.max() + 1))
    np.add.at(counts, (docs, words), 1)
    peer = LatentDirichletAllocation(20, max_iter=30, random_state=0).fit(counts)
    variational = -np.log(peer.perplexity(counts))
    assert variational < found["likelihood"] < truth


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_clusters_are_those_of_the_exact_tree(short: Path, metric: str) -> None:
    """Neighbours that are found by and by, and their edges alone, lead to nearly the same clusters
    (Qiao 2021, table 4.2), whoever is killed; most offers need not be sent (4.7.2: the filter)."""
    from sklearn.cluster import HDBSCAN
    from sklearn.metrics import fowlkes_mallows_score

    def alone_each(labels: np.ndarray) -> np.ndarray:
        noise = labels < 0
        return np.where(noise, labels.max() + np.cumsum(noise), labels)

    out = short / "out.npz"
    given = {"POINTS": "4000", "CLUSTERS": "40", "DIMENSIONS": "5", "METRIC": metric,
             "OUT": str(out)}  # fmt: skip
    launched, killed = Launched(short, "hdbscan.py", "--hosts", "2", **given), False
    while not killed and launched.process.poll() is None:
        time.sleep(0.1)
        if len(hosts := launched.hosts()) == 2 and (short / "checkpoints").is_dir():
            hosts[1].send_signal(signal.SIGKILL)
            killed = True
    there = result_of(launched.output())
    assert killed
    found = np.load(out)
    exact = HDBSCAN(min_cluster_size=5, metric=metric, copy=True).fit(found["x"]).labels_
    for result, labels in ((there, found["labels"]),):
        assert fowlkes_mallows_score(alone_each(labels), alone_each(exact)) > 0.94
        assert abs(result["clusters"] - exact.max() - 1) <= 0.12 * exact.max()
        assert result["spared"] > 0.25
    mine = alone("hdbscan.py", **given, CLUSTER_MAX="60")
    again = np.load(out)
    assert np.bincount(again["labels"][again["labels"] >= 0]).max() <= 60
    assert mine["clusters"] > 0


def test_offers_that_would_not_be_taken_change_nothing(short: Path) -> None:
    """The filter spares bytes, and misses no neighbour."""
    from sklearn.neighbors import NearestNeighbors

    given = {"POINTS": "2000", "CLUSTERS": "20", "OUT": str(short / "out.npz")}
    sent, recall = [], []
    for plainly in "01":
        sent.append(alone("hdbscan.py", **given, PLAINLY=plainly)["mail_bytes"])
        found = np.load(short / "out.npz")
        nearest = NearestNeighbors(n_neighbors=15).fit(found["x"]).kneighbors()[1]
        both = zip(found["near"], nearest, strict=True)
        recall.append(np.mean([len(np.intersect1d(a, b)) / 15 for a, b in both]))
    assert sent[0] < 0.75 * sent[1]
    assert recall[0] > max(0.95, recall[1] - 0.005)
