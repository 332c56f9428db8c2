"""Acts in force, and the tables on the device that they need."""
