"""``python -m regress``: the command, as launchers of many processes start it."""

import sys

from regress.cli import main

sys.exit(main())
