"""``python -m onepiece.cli``: the same as ``onepiece``."""

import sys

from onepiece.cli.main import main

sys.exit(main())
