"""`slackwater`: the program. Ctrl-C ends it quietly from its first line on."""

from slackwater.cli import interrupting


def main() -> None:
    interrupting.at_once()
    from slackwater.cli.commands import app
    from slackwater.cli.program import run

    run(app, "slackwater")


if __name__ == "__main__":
    main()
