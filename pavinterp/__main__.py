"""`python -m pavinterp`: the same as the `pavinterp` command."""

from pavinterp.cli import main

if __name__ == "__main__":
    main()
