"""Numbers from arrays alone."""
