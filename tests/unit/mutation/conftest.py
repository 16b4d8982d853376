"""Makes the package `mutation` of the repository importable, behind the installed ones."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[3])
if ROOT not in sys.path:
    sys.path.append(ROOT)
