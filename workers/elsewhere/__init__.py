"""A run that somebody launched by themselves, watched and told to a board over HTTPS: `meshboard-meter`."""
