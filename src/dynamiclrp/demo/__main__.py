"""`python -m dynamiclrp.demo`."""

import sys

from . import main

sys.exit(main())
