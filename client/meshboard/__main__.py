"""Run the `meshboard` command with `python -m meshboard`."""

from meshboard.commands import main

main()
