"""`meshboard-meter`, or which of a host's packages it lacks: where the board alone was installed the command is too."""

from __future__ import annotations

import sys

NOT_STARTED = 127


def main() -> int:
    try:
        from workers.elsewhere import wrapper
    except ModuleNotFoundError as error:
        words = f"The package {error.name} is missing. Install it with pip install 'meshboard[worker]'."
        sys.stderr.write(f"meshboard-meter: {words}\n")
        return NOT_STARTED
    return wrapper.main()


if __name__ == "__main__":
    sys.exit(main())
