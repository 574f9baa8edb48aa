"""``python -m spillway`` is the command ``spillway``."""

from spillway.cli.app import main

if __name__ == "__main__":
    main()
