"""``python -m cupyflash`` is the ``cupyflash`` command."""

import sys

from cupyflash.cli import main

if __name__ == "__main__":
    sys.exit(main())
