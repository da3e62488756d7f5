"""`loadgen`: the program. It fits models, and each of its processes is one core's work: it says so
before anything loads a library that would take all cores."""

import os

from slackwater.console import interrupt


def main() -> None:
    interrupt.at_once()
    from slackwater.common.native import blas_threads

    os.environ.update(blas_threads.one_each(os.environ))
    from slackwater.console.program import run
    from slackwater.loadgen.cli.commands import app

    run(app, "loadgen")


if __name__ == "__main__":
    main()
