"""What ops ask of sizes and options, said once for both panels."""
