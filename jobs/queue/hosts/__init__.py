"""Which machines are hosts: how they join, what they may say and read, and what people see of them."""
