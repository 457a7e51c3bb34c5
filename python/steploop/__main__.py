"""`python -m steploop` is the `steploop` command."""

import sys

from steploop.cli import main

if __name__ == "__main__":
    sys.exit(main())
