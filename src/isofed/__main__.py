"""The ``isofed`` command, also as ``python -m isofed``."""

import sys


def main() -> None:
    """Ctrl-C is heard from the first moment: loading what a command needs takes longer than a moment."""
    try:
        from isofed.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.stderr.write("isofed: stopped.\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
