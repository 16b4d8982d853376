"""The helpers beside the tests are imported by name, by tests and ranks alike."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
