"""The command `meshboard-meter`. It names the missing package if only the board's packages are installed."""

from __future__ import annotations

import sys

NOT_STARTED = 127


def main() -> int:
    try:
        from workers.external_runs import cli
    except ModuleNotFoundError as error:
        text = f"The package {error.name} is missing. Install it with pip install 'meshboard[worker]'."
        sys.stderr.write(f"meshboard-meter: {text}\n")
        return NOT_STARTED
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
