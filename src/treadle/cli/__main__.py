"""`python -m treadle.cli` is the command `treadle`."""

from treadle.cli import main

raise SystemExit(main())
