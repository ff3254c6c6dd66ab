"""Where the `pavinterp` command and `python -m pavinterp` begin: Ctrl-C ends in one line even while Python imports."""

import sys


def main() -> None:
    """Run the command line and exit."""
    try:
        from pavinterp.cli import main as run

        run()
    except KeyboardInterrupt as error:
        from pavinterp import exits

        sys.exit(exits.end(error))


if __name__ == "__main__":
    main()
