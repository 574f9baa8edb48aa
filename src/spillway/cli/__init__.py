"""The command line: ``spillway demo``, ``spillway doctor`` and so on. One file per command, and ``app`` holds them."""
