#!/usr/bin/env python
"""Django's command line."""

import sys

from webapp.commands import manage

if __name__ == "__main__":
    sys.exit(manage())
