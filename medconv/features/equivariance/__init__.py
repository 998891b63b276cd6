"""`conv=mirror`: a whole network that commutes with reflections of its image."""
