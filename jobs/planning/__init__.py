"""Plans of draft specs, and the hosts and clusters to plan for."""
