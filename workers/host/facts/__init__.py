"""What a host knows of the machine it is on (`contracts.hosts`): what it does not tell is left out, never made up."""
