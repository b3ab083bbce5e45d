#!/usr/bin/env python
"""Django's command line."""

from webapp.manage import main

if __name__ == "__main__":
    main()
