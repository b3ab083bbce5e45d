"""`python -m meshboard` is the `meshboard` command."""

from meshboard.commands import main

main()
