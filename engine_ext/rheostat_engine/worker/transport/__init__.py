"""How rows and events leave the worker."""
