"""`python -m kvx`."""

import sys

from kvx.cli import main

sys.exit(main())
