"""Models over HTTP: an API that answers many callers together, and a page to try them on. Needs ``thalweg[serve]``."""
