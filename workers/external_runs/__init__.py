"""External runs: a run that a user starts without Meshboard, reported to a board over HTTPS by `meshboard-meter`."""
