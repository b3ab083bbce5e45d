"""British English, with the zone wherever a time stands."""
