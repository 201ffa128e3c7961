"""Models that come with the package."""
