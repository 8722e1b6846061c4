"""What the one-job scripts beside this file share: they run a subcommand of `autoport` from any folder."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(command: str) -> None:
    """Run `autoport COMMAND` with the arguments of this process."""
    try:
        from autoport.cli import main
    except ModuleNotFoundError as error:
        message = (
            f"error SETUP: {error}. Next: run '{ROOT}/scripts/setup.sh', then use '{ROOT}/.venv/bin/python'"
        )
        print(message, file=sys.stderr)
        raise SystemExit(2) from None
    sys.argv.insert(1, command)
    main()
