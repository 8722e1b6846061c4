"""Fuzz the readers of headers and configs, and the planning of what was read.

    python benchmarks/fuzz.py [--seconds 3600] [--seed 0]

Stops at the first input that is neither read (or planned) nor refused, and prints its seed.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fuzzing import config_case, header_case, plan_case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    end, seed, slowest = time.monotonic() + arguments.seconds, arguments.seed, 0.0
    with tempfile.TemporaryDirectory() as folder:
        headers, configs = Path(folder, "headers"), Path(folder, "configs")
        headers.mkdir()
        configs.mkdir()
        while time.monotonic() < end:
            for case, place in ((header_case, headers), (config_case, configs), (plan_case, configs)):
                started = time.process_time()
                try:
                    case(place, random.Random(seed))
                except Exception as error:
                    print(f"{case.__name__} with seed {seed}: {type(error).__name__}: {error}")
                    raise
                slowest = max(slowest, time.process_time() - started)
            seed += 1
    count = seed - arguments.seed
    print(f"{count} headers, {count} configs and {count} plans, no crash; slowest {slowest:.2f} s of CPU")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
