"""`data=joined`: several datasets with labels of their own, joined by the names of their classes."""
