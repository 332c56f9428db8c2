"""``python -m rheostat`` is the command ``rheostat``."""

import sys

from rheostat._cli import main

sys.exit(main())
