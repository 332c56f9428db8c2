"""Sites in the module tree: how they are found, proven on the model itself, and put in."""
