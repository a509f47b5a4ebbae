"""Which tier of tests runs; the Makefile sets it."""

import os

# "all" is `make test-all`: tests marked `all`, and larger numbers of kills and steps.
TIER = os.environ.get("TREADLE_TIER", "test")
IS_FULL = TIER == "all"
