"""Measuring predicted against reference label maps: one case (`scores`), many (`statistics`, `comparison`), a report."""
