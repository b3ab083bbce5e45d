"""Read parallel layouts from the config files of other training tools."""
