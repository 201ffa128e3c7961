"""Images to classes: everything about classification."""
