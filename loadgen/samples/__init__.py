"""Rows of public traces that come with the package, so that a first run needs nothing else.

`philly.csv`: 20 consecutive distributed jobs of one virtual cluster of Microsoft's Philly trace
(October 2017), as msr-fiddle/philly-traces published it under CC-BY-4.0 and petuum/adaptdl derived
it; ATTRIBUTION.md has the words and the changes.
"""

from pathlib import Path
from typing import Final

PHILLY: Final = Path(__file__).with_name("philly.csv")
