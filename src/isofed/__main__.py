"""``python -m isofed`` is the ``isofed`` command."""

from isofed.cli import main

if __name__ == "__main__":
    main()
