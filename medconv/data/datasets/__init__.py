"""One function per dataset layout; each returns a `Dataset`."""
