"""What a layout costs, before it runs. Pure Python: no torch, no Django, no I/O."""
