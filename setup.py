"""Puts into a wheel what lies beside the packages in a checkout; webapp/installation.py finds it in either place."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# Inside the package `webapp`: where it comes from.
FILES = {"templates": ROOT / "templates", "documentation": ROOT / "docs" / "site"}


class WithFiles(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name, source in FILES.items():
            target = Path(self.build_lib) / "webapp" / name
            shutil.rmtree(target, ignore_errors=True)
            if source.is_dir():
                shutil.copytree(source, target)


setup(cmdclass={"build_py": WithFiles})
