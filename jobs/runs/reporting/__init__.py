"""Accept reports over HTTPS of runs that other launchers or engines without Redis start."""
