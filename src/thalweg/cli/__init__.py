"""The command line: a thin layer of words and tables over ``tasks`` and ``recipes``."""

import os

__all__: list[str] = []

# Idle threads of OpenMP spin for milliseconds before they sleep, and several trainings on the same cores then wait for
# each other's spinning: four on two cores took 16 times as long as one. It is read when torch is loaded, after this.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
