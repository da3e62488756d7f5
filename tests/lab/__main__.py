"""python -m tests.lab: see lab.py."""

import sys

from tests.lab.lab import main

sys.exit(main(sys.argv[1:]))
