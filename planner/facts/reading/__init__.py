"""How a spec is read and told: fields into a spec, where each lies, what of it cannot run yet."""
