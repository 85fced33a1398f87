"""``python -m hivenb``: the same as the command ``hivenb``."""

import sys

from hivenb.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
