"""The plants are imported by name, by the processes of the systems too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
