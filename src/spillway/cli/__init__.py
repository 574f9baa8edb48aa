"""The command line: ``spillway demo``, ``spillway version``. One file per command, and ``app`` that holds them."""
