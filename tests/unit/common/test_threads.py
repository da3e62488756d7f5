"""Linear algebra keeps to one core where many small models are fitted."""

import os
import subprocess
import sys

from slackwater.common.native import blas_threads


def test_what_is_set_stands() -> None:
    assert blas_threads.one_each({"OMP_NUM_THREADS": "4"}) == {
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def test_loadgen_says_so_before_anything_loads_numpy() -> None:
    program = (
        "import os, sys\n"
        "import slackwater.loadgen.cli.main\n"
        "assert 'numpy' not in sys.modules\n"
        "sys.argv[1:] = ['generate', 'tiresias']\n"
        "try:\n    slackwater.loadgen.cli.main.main()\nexcept SystemExit: pass\n"
        "import numpy, threadpoolctl\n"
        "pools = threadpoolctl.threadpool_info()\n"
        "print('THREADS', [pool['num_threads'] for pool in pools])\n"
    )
    clean = {k: v for k, v in os.environ.items() if k not in blas_threads.VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=clean, timeout=60
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1].removeprefix("THREADS ")
    assert set(said.strip("[]").split(", ")) == {"1"}, said
