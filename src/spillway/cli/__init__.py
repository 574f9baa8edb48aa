"""The command line, one file a command. No file imports torch before its command runs: help is there at once."""
