"""Fuzz the readers of headers, indexes, configs, modeling files, decisions and state, and the planning.

    python benchmarks/fuzz.py [--seconds 3600] [--seed 0]

Stops at the first input that is neither read (or planned) nor refused, or takes more memory or time than
any input may, and prints its seed; at one that does not end with a traceback, its input being in the folder that
is named at the start.
"""

import argparse
import faulthandler
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fuzzing import config_case, header_case, parallel_case, plan_case
from fuzzing_code import bomb_case, code_case
from fuzzing_state import index_case, state_case

CASES = (header_case, config_case, plan_case, parallel_case, code_case, bomb_case, index_case, state_case)
LARGEST_ADDRESS_SPACE = 3 * 2**30  # bytes; Python, torch and transformers take about 2 * 2**30 of them
LONGEST_WAIT = 300  # seconds until a case that does not end is ended
LONGEST_CASE = 30.0  # seconds of CPU; the first case of a kind imports transformers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (LARGEST_ADDRESS_SPACE, LARGEST_ADDRESS_SPACE))
    end, seed, slowest = time.monotonic() + arguments.seconds, arguments.seed, 0.0
    with tempfile.TemporaryDirectory() as folder:
        print(f"inputs are in {folder}", flush=True)
        while time.monotonic() < end:
            for case in CASES:
                place = Path(folder, case.__name__)
                place.mkdir(exist_ok=True)
                faulthandler.dump_traceback_later(LONGEST_WAIT, exit=True)
                started = time.process_time()
                try:
                    case(place, random.Random(seed))
                except Exception as error:
                    print(f"{case.__name__} with seed {seed}: {type(error).__name__}: {error}")
                    raise
                taken = time.process_time() - started
                if taken > LONGEST_CASE:
                    print(f"{case.__name__} with seed {seed}: {taken:.0f} s of CPU")
                    return 1
                slowest = max(slowest, taken)
            seed += 1
    count = seed - arguments.seed
    names = ", ".join(case.__name__ for case in CASES)
    print(f"{count} of each of {names}: no crash; slowest {slowest:.2f} s of CPU, ", end="")
    print(f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
