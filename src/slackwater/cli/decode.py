"""`slackwater-decode`: one msgpack document on stdin, JSON on stdout.

For `nats sub 'sw.v1.>' --translate slackwater-decode`, which runs it once per message: it imports
msgspec alone, to start fast. What is not msgpack is passed through (replies may be JSON already).
"""

import sys

import msgspec


def main() -> None:
    payload = sys.stdin.buffer.read()
    try:
        text = msgspec.json.encode(msgspec.msgpack.decode(payload))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError):
        text = payload
    sys.stdout.buffer.write(text + b"\n")


if __name__ == "__main__":
    main()
