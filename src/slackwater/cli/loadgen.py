"""`loadgen`: the program. It fits models, and each of its processes is one core's work: it says so
before anything loads a library that would take all cores."""

import os

from slackwater.common import threads


def main() -> None:
    os.environ.update(threads.one_each(os.environ))
    from slackwater.cli.outcome import logs_to_stderr
    from slackwater.cli.workloads import app

    logs_to_stderr()
    app()


if __name__ == "__main__":
    main()
