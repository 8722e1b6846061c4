"""`autoport --help` must stay instant: it is what an agent runs first, and often."""

import subprocess
import sys

HEAVY = {"torch", "transformers", "vllm", "jinja2", "libcst", "huggingface_hub", "safetensors", "yaml"}


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from autoport.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
    assert "compute-tp" in result.stdout
