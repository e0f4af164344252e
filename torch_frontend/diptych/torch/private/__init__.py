"""What diptych borrows of torch's private API, each name in one file, by subject. No other room names any of it."""
