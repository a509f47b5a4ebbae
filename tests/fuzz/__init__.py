"""Fuzzers: a few rounds with fixed seeds in every run of the tests, and as many as fit in `make fuzz`."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

FUZZERS = 5


def rounds(few: int) -> Iterator[random.Random]:
    """A source of chance per round; what fails says its seed.

    The same few seeds each time, or with TREADLE_FUZZ_SECONDS others, for
    this fuzzer's share of that time.
    """
    seconds = float(os.environ.get("TREADLE_FUZZ_SECONDS", "0")) / FUZZERS
    end = time.monotonic() + seconds
    seed = random.SystemRandom().randrange(2**32) if seconds else 0
    number = 0
    while number < few or time.monotonic() < end:
        try:
            yield random.Random(seed + number)
        except BaseException as error:
            error.add_note(f"the seed was {seed + number}")
            raise
        number += 1
