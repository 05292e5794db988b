"""Names of other systems, over the sessions of this package."""
