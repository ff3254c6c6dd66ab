"""Where the `pavinterp` command and `python -m pavinterp` begin: Ctrl-C ends in one line even while Python imports."""

import sys


def main() -> None:
    """Run the command line and exit."""
    try:
        from pavinterp.cli import main as run

        run()
    except KeyboardInterrupt:
        print("pavinterp: interrupted: nothing was written", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
