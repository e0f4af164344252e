"""Rules for the options and sizes of ops, shared by both panels."""
