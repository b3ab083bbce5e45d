"""What a step of a layout costs: traffic, memory and time, predicted from the facts."""
