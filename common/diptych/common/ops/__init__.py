"""Rules about sizes and options of ops, one copy for both panels."""
