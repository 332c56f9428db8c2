"""What all parts of the process share: threads for large work, turns, ends of calls, open files."""
