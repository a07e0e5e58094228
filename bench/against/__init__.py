"""The working tree against another commit: whole jobs of both take turns."""
