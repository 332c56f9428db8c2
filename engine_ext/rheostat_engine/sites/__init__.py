"""Finds the sites in the module tree, tests them on the running model, and installs the op."""
