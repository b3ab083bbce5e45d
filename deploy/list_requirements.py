"""Print the requirements of an extra of pyproject.toml. An image installs them in a layer below the source."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
print(*project.get("dependencies", []), *project["optional-dependencies"][sys.argv[1]], sep="\n")
