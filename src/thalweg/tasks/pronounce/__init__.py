"""Words and sentences to phones, with a dictionary."""
