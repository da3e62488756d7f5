"""`slackwater`: the program. Ctrl-C ends it quietly from its first line on."""

from slackwater.console import interrupt


def main() -> None:
    interrupt.at_once()
    from slackwater.cli.commands import app
    from slackwater.console.program import run

    run(app, "slackwater")


if __name__ == "__main__":
    main()
