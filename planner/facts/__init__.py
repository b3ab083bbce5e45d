"""Define the spec, parameter shapes, and order of work. Contains no predictions."""
