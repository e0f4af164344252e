"""The names of torch's private API that diptych uses, each in one file, by subject. No other room names any of it."""
