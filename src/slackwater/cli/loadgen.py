"""`loadgen`: the program. It fits models, and each of its processes is one core's work: it says so
before anything loads a library that would take all cores."""

import os

from slackwater.cli import interrupting


def main() -> None:
    interrupting.at_once()
    from slackwater.common import threads

    os.environ.update(threads.one_each(os.environ))
    from slackwater.cli.program import run
    from slackwater.cli.workloads import app

    run(app, "loadgen")


if __name__ == "__main__":
    main()
