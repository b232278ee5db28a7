"""Burns CPU for so many seconds, and says every half of a second what part of a core it got."""

import sys
import time

HALF_S = 0.5


def burn(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        wall, cpu = time.monotonic(), time.process_time()
        while time.monotonic() - wall < HALF_S:
            pass
        print((time.process_time() - cpu) / (time.monotonic() - wall))


if __name__ == "__main__":
    burn(float(sys.argv[1]))
