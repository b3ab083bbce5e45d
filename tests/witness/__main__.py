"""`make witness`: the kernel's bytes beside the meter's, as a table."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.witness.compare import TRAINED, Seen, training_spec, watch


def main() -> int:
    found: list[Seen] = []
    with tempfile.TemporaryDirectory() as folder:
        for count in (2, 3, 4):
            found += watch(count, Path(folder, str(count)))
        for name, layout in TRAINED.items():
            spec = training_spec(layout)
            seen = watch(spec.layout.world_size, Path(folder, name.replace(" ", "-")), spec)
            found += [s._replace(name=name) for s in seen]
    print(f"{'work':<16}{'hosts':>6}{'payload B':>16}{'gloo model B':>16}{'ss -ti B':>16}{'ratio':>9}  verdict")
    for s in found:
        numbers = f"{s.payload_bytes:>16,}{sum(s.modelled):>16,.0f}{sum(s.wire):>16,}{s.ratio:>9.4f}"
        print(f"{s.name:<16}{s.hosts:>6}{numbers}  {'pass' if s.passed else 'FAIL'}")
    failed = sum(not s.passed for s in found)
    print(f"{len(found) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
