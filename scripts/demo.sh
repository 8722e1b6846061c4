#!/usr/bin/env bash
# Set up .venv, then port a tiny Yi-shaped model and prove the port on the CPU.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh"
exec "$root/.venv/bin/autoport" demo "$@"
