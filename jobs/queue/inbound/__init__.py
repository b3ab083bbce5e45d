"""Apply the events of hosts, and handle hosts without contact."""
