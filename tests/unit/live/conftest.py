"""Helpers beside the tests are imported by name, by the processes of several ranks too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
